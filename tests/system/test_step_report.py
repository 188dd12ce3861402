"""The sections of a report about functions, kernels, program runs and memory over time, on the
small llama under FSDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from shardwright.compiler.ir.analysis import flops as graph_flops
from shardwright.compiler.ir.traits import CONTRACTIONS
from shardwright.compiler.neff.schedule import run_counts
from shardwright.orchestrator.report import step_report
from shardwright.orchestrator.report.memory_report import memory_section
from shardwright.orchestrator.report.step_report import function_rows, step_chart, timelines
from shardwright.orchestrator.road.timing import step_of
from shardwright.sim_cluster.timing.step_parts import StepParts, step_parts
from shardwright.sim_cluster.timing.step_time import Replayed, time_step
from tests.support.small_job import Road

Row = Mapping[str, Any]


@pytest.fixture(scope="module")
def timing(small_road: Road) -> Replayed:
    return time_step(step_of(small_road.built, small_road.built.programs))


@pytest.fixture(scope="module")
def parts(timing: Replayed) -> StepParts:
    return step_parts(timing)


@pytest.fixture(scope="module")
def rows(small_road: Road, parts: StepParts) -> list[dict[str, Any]]:
    return function_rows(parts, small_road.built.programs)


def test_functions_and_kernels_add_up(rows: list[Row], timing: Replayed) -> None:
    assert sum(row["time_ps"] for row in rows) == timing.step_time_ps - timing.breakdown_ps["idle"]
    assert [r["time_ps"] for r in rows] == sorted((r["time_ps"] for r in rows), reverse=True)
    for row in rows:
        assert row["time_ps"] == sum(row["breakdown_ps"].values())
        code = sum(row["breakdown_ps"].get(c, 0) for c in ("compute", "memory"))
        assert sum(k["time_ps"] for k in row["kernels"]) == (code if row["kernels"] else 0)
        assert row["flops"] == sum(k["flops"] for k in row["kernels"])
        assert row["hbm_bytes"] == sum(k["hbm_bytes"] for k in row["kernels"])


def test_operations_are_those_of_the_graphs_and_what_is_made_again(
    rows: list[Row], small_road: Road
) -> None:
    step = small_road.built.plan.step
    runs = run_counts(step.schedules[0])
    for program in step.programs:
        needed = runs[program.name] * graph_flops(program.graph, CONTRACTIONS)
        done = sum(row["flops"] for row in rows if row["program"] == program.name)
        assert needed <= done <= 1.5 * needed, program.name


def test_kernels_have_the_users_lines(rows: list[Row]) -> None:
    listed = [k for row in rows for k in row["kernels"]]
    kernels = [k for k in listed if not k["name"].endswith("more kernels")]
    known = sum(
        k["flops"] for k in kernels if "decoder.py:" in k["loc"] or "attending.py:" in k["loc"]
    )
    assert known > 0.99 * sum(k["flops"] for k in kernels) > 0
    assert all(k["loc"] == "" or ":" in k["loc"] for k in listed)


def test_small_functions_and_kernels_are_one_row(
    parts: StepParts, small_road: Road, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_report, "FUNCTIONS", 3)
    monkeypatch.setattr(step_report, "KERNELS", 2)
    few = function_rows(parts, small_road.built.programs)
    assert len(few) == 3 and few[-1]["function"] == f"{len(rows) - 2} more functions"
    assert all(len(row["kernels"]) <= 2 for row in few)
    for key in ("time_ps", "flops", "hbm_bytes", "calls"):
        assert sum(row[key] for row in few) == sum(row[key] for row in rows)


def test_charts_name_programs_and_functions(parts: StepParts, small_road: Road) -> None:
    (stage,) = step_chart(parts)
    programs = small_road.built.programs
    assert {run[0] for run in stage["runs"]} == set(programs)
    for timeline in timelines(parts, programs):
        names = [function.name for function in programs[timeline["program"]].functions]
        assert timeline["function"] in names
        gathers = [s for t in timeline["tracks"] if t["name"] == "stream0" for s in t["slices"]]
        assert gathers


def test_memory_over_time_at_the_peak_is_what_the_peak_holds(small_road: Road) -> None:
    memory = memory_section(small_road.built)
    own = [r for r in memory["timeline"] if r["program"] == memory["peak_program"]]
    highest = max(own, key=lambda row: row["live_bytes"])
    assert highest["categories"]["gathered"] == memory["categories"]["gathered"] > 0
    assert highest["categories"]["parameters"] == memory["argument_bytes"]["parameters"]
