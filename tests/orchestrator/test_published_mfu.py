"""Published MFU: worked out from facts of the rows, and compared with ours by one definition."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.compiler.machine.target import load_target, logical
from shardwright.orchestrator.report import report
from shardwright.orchestrator.report.limits import EXTRAPOLATED, Confidence
from shardwright.orchestrator.validation.published_mfu import best_run, measured_runs

PEAK = 95e12  # FLOP/s of a NeuronCore-v2 in bf16, as published


def test_mfu_by_hand() -> None:
    """Two sequences of 10 tokens: 6 x 10 x 1000 + 12 x 3 x 8 x 100 = 88,800 FLOP each; in 0.5 s on
    4 cores of 1000 FLOP/s: 177,600 / 2000."""
    run = replace(
        measured_runs()[0],
        layers=3,
        hidden=8,
        seq_len=10,
        matmul_params=1000.0,
        global_batch=2,
        step_time_s=0.5,
        cores=4,
    )
    assert run.mfu(1000.0) == pytest.approx(88.8)


@pytest.mark.parametrize(
    ("id", "percent"), [("T151", 32.10), ("T181", 26.10), ("T127", 28.88), ("T071", 38.93)]
)
def test_figures_are_those_of_the_table_the_rows_are_from(id: str, percent: float) -> None:
    """What the table derives by the same formula from unrounded parameters."""
    (run,) = (run for run in measured_runs() if run.id == id)
    assert 100 * run.mfu(PEAK) == pytest.approx(percent, abs=0.05)


def test_rows_name_their_sources_and_lie_on_whole_meshes() -> None:
    ids = [run.id for run in measured_runs()]
    assert len(set(ids)) == len(ids) >= 12
    for run in measured_runs():
        assert re.fullmatch(r"aws-neuron/\S+ \S+@[0-9a-f]{10}", run.source), run.id
        assert run.cores % (run.tp * run.pp) == 0 and run.attention in ("causal", "full")
        assert 0 < run.mfu(PEAK) < 1 and load_target(run.machines[0])


def test_the_best_of_a_machine_and_a_kind() -> None:
    for machine in ("trn1.32xlarge", "trn1n.32xlarge"):
        target = load_target(machine)
        for kind in ("causal", "full"):
            best = best_run(target, kind)
            own = [r for r in measured_runs() if machine in r.machines and r.attention == kind]
            assert best in own and best.mfu(PEAK) == max(r.mfu(PEAK) for r in own)
        assert best_run(target, "none") is None


@pytest.mark.parametrize("machine", ["trn2.48xlarge", "inf2.48xlarge", "trn3-gen1-ultraserver"])
def test_none_is_in_the_set_of_other_machines(machine: str) -> None:
    assert best_run(load_target(machine), "causal") is None


def test_none_is_of_a_machine_that_there_is_not() -> None:
    assert best_run(logical(load_target("trn1n.32xlarge"), 2, True), "causal") is None


def test_how_many_times_ours_is_what_was_published() -> None:
    target = load_target("trn1.32xlarge")
    best = best_run(target, "causal")
    assert best is not None
    section = report.published_section(target, "causal", 2 * best.mfu(PEAK))
    assert section is not None and section["times"] == pytest.approx(2.0)
    assert (section["mfu"], section["id"]) == (best.mfu(PEAK), best.id)
    assert report.published_section(target, "none", 0.5) is None


@pytest.mark.parametrize(
    ("trust", "times", "slowest"),
    [
        (EXTRAPOLATED, 1.5, 3.0),  # 2 s at 1.5 times the MFU: 3 s for the published one
        (EXTRAPOLATED, 1.1, 2.5),  # the band is wider than that
        (EXTRAPOLATED, 0.5, 2.5),
        ("calibrated on rows", 1.5, 2.5),  # published runs cover it
    ],
)
def test_the_slow_end_reaches_what_was_published_where_no_run_covers_it(
    trust: str, times: float, slowest: float
) -> None:
    found = report.band([1.5, 2.0, 2.5], 2.0, {"times": times}, Confidence(trust, ""))
    assert found == [1.5, slowest]
    assert report.band([1.5, 2.5], 2.0, None, Confidence(EXTRAPOLATED, "")) == [1.5, 2.5]


def test_the_page_has_every_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    for run in measured_runs():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {run.id} |"))
        for cell in (run.model, run.attention, f"{run.cores:,}", f"{run.tp}, {run.pp}", run.source):
            assert f"| {cell} |" in line, run.id
        assert f"| {100 * run.mfu(PEAK):.1f} % |" in line, run.id
