"""What a report says of cores that are loaded later than the others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.report.report import _late_ranks
from shardwright.sim_cluster.timing.faults import Faults
from tests.support.small_job import write_job

TWO_CORES = ["--set", "cluster.target=trn1.2xlarge", "--mesh", "dp_shard=2"]


def told(late: dict[int, float]) -> list[Any]:
    built: Any = SimpleNamespace(layout=SimpleNamespace(faults=Faults(late_cores=late)))
    return list(_late_ranks(built))


def test_every_two_minutes_a_warning_names_who_is_missing() -> None:
    first, second = told({5: 300.0, 6: 200.0, 9: 20.0})
    assert {first.severity, second.severity} == {"warning"} and first.code == "SW_LATE_RANK"
    assert first.message == "after 120 s all others still wait for core 5-6 to connect"
    assert second.message == "after 240 s all others still wait for core 5 to connect"
    assert "the step begins after 300 s" in first.hint


def test_who_comes_within_two_minutes_is_not_told_of() -> None:
    assert told({}) == told({5: 119.0}) == []


@pytest.mark.exhaustive
def test_a_run_tells_of_late_cores_and_steps_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", str(write_job(tmp_path)), *TWO_CORES, "--no-compare", "--out", "out"]
    assert main([*words, "--fault", "late_cores=1:250"]) == 0
    lines = map(json.loads, (tmp_path / "out/events.jsonl").read_text().splitlines())
    waits = [(e["after_s"], e["cores"]) for e in lines if e["event"] == "ranks.waiting"]
    assert waits == [(120.0, [1]), (240.0, [1])]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [f["code"] for f in report["findings"]].count("SW_LATE_RANK") == 2
    assert report["faults"]["slowdown"] == 1 and report["faults"]["late_cores"] == "1:250"
