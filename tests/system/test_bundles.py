"""Bundles are a function of the job: equal bytes from every run, whatever machine they will be
timed on; and a second run compiles nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.machine.target import load_target
from shardwright.compiler.neff.bundle import Bundle, load_bundle
from shardwright.orchestrator.cli import main
from shardwright.sim_cluster import profiles
from shardwright.sim_cluster.network import network
from shardwright.sim_cluster.network.collective_costs import collective_costs
from shardwright.sim_cluster.timing import step_time
from shardwright.sim_cluster.timing.step_time import Step, time_step
from tests.support.small_job import (
    TARGET,
    Road,
    build_on,
    bundle_bytes,
    bundle_of,
    small_llama,
    write_job,
)


@pytest.mark.matrix
def test_a_second_run_compiles_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan and a run of one job: the run finds every unit in the cache but one, the time of the
    step with the trace that only a run leaves."""
    job = write_job(tmp_path, cache={"dir": str(tmp_path / "cache")})
    assert main(["plan", str(job), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["units"]
    assert {row["cache"] for row in first} == {"miss"}
    assert sum(row["kind"] == "partition" for row in first) == 1
    assert sum(row["kind"] == "compile" for row in first) >= 6
    assert main(["run", str(job), "--no-compare", "--out", str(tmp_path / "out")]) == 0
    assert "nothing to compile" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (traced,) = (row for row in report["units"] if row["cache"] == "miss")
    assert (traced["kind"], traced["name"]) == ("time", "step nominal")
    hits = {row["key"] for row in report["units"]} - {traced["key"]}
    assert hits < {row["key"] for row in first} and len(hits) == len(first) - 1
    assert report["numerics"]["passed"]
    assert set(report["numerics"]["l0"]) == {"forward", "backward", "update"}
    assert main(["neff", "verify", str(tmp_path / "out" / "bundle")]) == 0


@pytest.mark.matrix
def test_two_whole_runs_write_the_same_bytes(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for name in ("a", "b"):
        cache = f"cache.dir={tmp_path / name / 'cache'}"
        assert main(["run", str(job), "--out", str(tmp_path / name), "--set", cache]) == 0
    assert bundle_bytes(tmp_path / "a" / "bundle") == bundle_bytes(tmp_path / "b" / "bundle")


@pytest.mark.matrix
def test_a_cold_build_writes_the_same_bytes(small_bundle: Bundle, tmp_path: Path) -> None:
    """Nothing of the first build is reused: every unit is computed again."""
    road = build_on(small_llama(), {"dp_shard": 4}, tmp_path / "cache")
    assert {row.cache for row in road.rows} == {"miss"}
    again = bundle_of(road, tmp_path / "bundle")
    assert bundle_bytes(again.path) == bundle_bytes(small_bundle.path)


def other_machine(constants: Any) -> Any:
    """A set of constants with every number changed, and every switch turned."""
    changed: dict[str, Any] = {}
    for spec in dataclasses.fields(constants):
        value = getattr(constants, spec.name)
        if isinstance(value, bool):
            changed[spec.name] = not value
        elif isinstance(value, int | float):
            changed[spec.name] = type(value)(value * 0.6)
    assert changed
    return dataclasses.replace(constants, **changed)


def nominal_ps(bundle: Bundle) -> int:
    manifest = bundle.manifest
    step = Step(
        programs=bundle.programs,
        schedules=manifest.schedules,
        mesh={"dp_shard": 32},  # the four cores of the bundle do not fill an instance
        target=load_target(TARGET),
        instances=1,
    )
    return time_step(step).step_time_ps


@pytest.mark.matrix
def test_constants_of_the_run_profile_change_times_and_no_byte(
    small_road: Road, small_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = nominal_ps(small_bundle)
    machine = {name: other_machine(p) for name, p in profiles.PROFILES.items()}

    def wires(*given: Any, **settings: Any) -> Any:
        return other_machine(collective_costs(*given, **settings))

    monkeypatch.setattr(profiles, "PROFILES", machine)
    monkeypatch.setattr(step_time, "PROFILES", machine)
    monkeypatch.setattr(network, "collective_costs", wires)
    road = build_on(small_llama(), {"dp_shard": 4}, tmp_path / "cache")
    again = bundle_of(road, tmp_path / "bundle")
    assert {row.key for row in road.rows} == {row.key for row in small_road.rows}
    assert bundle_bytes(again.path) == bundle_bytes(small_bundle.path)
    assert nominal_ps(again) != before


def test_a_bundle_does_not_know_where_it_lies(bundle_copy: Path, small_bundle: Bundle) -> None:
    texts = b"".join(bundle_bytes(small_bundle.path).values())
    assert str(small_bundle.path).encode() not in texts
    assert load_bundle(bundle_copy).manifest == small_bundle.manifest
