"""Placement as a user meets it: shown with its reason, changes times and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config
from shardwright.orchestrator.report.report import base_report
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.job import write_and_load
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import time_programs
from shardwright.orchestrator.road.units import unit_service
from shardwright.sim_cluster.__main__ import main as simulate
from tests.support.small_job import write_job

MESH = {"dp_shard": 8, "tp": 4}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


NAMES = ("torus", "linear", "tp,dp_shard")


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Bundle]]:
    """Report and bundle of one job under each placement."""
    folder = tmp_path_factory.mktemp("placed")
    path, found = write_job(folder, mesh=MESH), {}
    for name in NAMES:
        job = config.load(path, [f"cluster.placement={name}"])
        stages = Stages()
        with unit_service(job, None) as service:
            built = build(job, service, stages)
            bundle = write_and_load(built, folder / name)
            timings = time_programs(built, bundle.programs, service)
            found[name] = base_report(built, timings, service, stages, {}), bundle
    return found


def collective_ps(report: dict[str, Any], axis: str) -> int:
    return sum(row["time_ps"] for row in report["collectives"] if row["axis"] == axis)


@pytest.mark.matrix
def test_a_placement_changes_times_and_no_program(
    placed: dict[str, tuple[dict[str, Any], Bundle]],
) -> None:
    digests = [dict(bundle.manifest.programs) for _, bundle in placed.values()]
    assert digests[0] == digests[1] == digests[2]
    reports = {name: report for name, (report, _) in placed.items()}
    for name in NAMES:
        assert reports[name]["placement"]["name"] == name
    assert reports["torus"]["placement"]["axes"] == {
        "dp_shard": "a ring through 8 chips",
        "tp": "2 neighbours",
    }
    assert reports["linear"]["placement"]["axes"]["dp_shard"] == "8 chips apart"
    assert reports["tp,dp_shard"]["placement"]["order"] == ["tp", "dp_shard"]
    assert "neighbouring" in reports["torus"]["placement"]["why"]
    torus, linear = (collective_ps(reports[n], "dp_shard") for n in ("torus", "linear"))
    assert torus < linear
    assert reports["torus"]["timing"]["step_time_ps"] < reports["linear"]["timing"]["step_time_ps"]


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_is_timed_where_it_was_placed(
    name: str,
    placed: dict[str, tuple[dict[str, Any], Bundle]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, bundle = placed[name]
    capsys.readouterr()
    assert simulate([str(bundle.path), "--time"]) == 0
    assert f"nominal {report['timing']['step_time_s']:.9f} s" in capsys.readouterr().out


def test_the_screen_names_the_place_of_every_axis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(write_job(tmp_path, mesh=MESH))]) == 0
    assert (
        "torus: dp_shard on a ring through 8 chips; tp on 2 neighbours" in capsys.readouterr().out
    )


def test_a_placement_that_misses_an_axis_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write_job(tmp_path, mesh=MESH))
    assert main(["plan", job, "--placement", "tp"]) == 2
    err = capsys.readouterr().err
    assert "SW_PLACEMENT" in err
    assert "cluster.placement" in err
    assert "dp_shard, tp" in err
