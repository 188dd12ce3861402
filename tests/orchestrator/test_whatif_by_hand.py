"""Figures of sweeps, scaling studies, tries and comparisons against arithmetic that stands here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from shardwright.compiler.diagnostics import CapacityError, CompileError, ExecutionError
from shardwright.orchestrator.changes.rules import Idea
from shardwright.orchestrator.changes.situation import Situation
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report import compare
from shardwright.orchestrator.report.tried import FITS, REFUSED, TOO_LARGE, gain, title
from shardwright.orchestrator.whatif import tries
from shardwright.orchestrator.whatif.rows import METRICS, Row, ordered, pareto, refused_row, row_of
from shardwright.orchestrator.whatif.scale import curves, mesh_sizes, orders
from shardwright.sharding.settings import AUTO, DEFAULTS

GIB = 2**30


def planned(
    step_ps: int = 80, tokens_per_s: float = 4e12, usd: float | None = 2.0, **memory: Any
) -> dict[str, Any]:
    """A report of a step of 80 ps, in which 320 tokens pass, half of it waiting for collectives."""
    return {
        "job": {
            "cluster": {"target": "trn1n.32xlarge", "instances": 3},
            "strategy": {"remat": "auto"},
        },
        "resolved": {"strategy.remat": {"value": "selective", "why": "the least that fits"}},
        "mesh": {"dp_shard": 12, "tp": 8},
        "cores": 96,
        "batch": {
            "global_batch": 64,
            "micro_batch": 4,
            "num_microbatches": 2,
            "tokens_per_sample": 5,
        },
        "memory": {"fits": True, "peak_bytes": 3 * GIB, "limit_bytes": 4 * GIB} | memory,
        "timing": {
            "step_time_ps": step_ps,
            "step_time_s": step_ps / 1e12,
            "band_s": [6e-11, 9e-11],
            "breakdown_ps": {
                "compute": 20,
                "collective_tp": 24,
                "collective_dp_shard": 16,
                "bubble": 12,
                "launch": 8,
            },
            "tokens_per_s": tokens_per_s,
            "mfu": 0.3,
            "hfu": 0.4,
            "confidence": "documented",
        },
        "cost": {"usd_per_hour": 64.5, "usd_per_step": 1e-9, "usd_per_1e6_tokens": usd},
        "goodput": {"goodput": 0.75},
        "findings": [],
        "provenance": {},
    }


# Rows


def test_figures_of_a_row() -> None:
    """320 tokens in 80 ps: a million take 0.25 us; 24 + 16 of 80 ps are exposed, 12 bubble."""
    found = row_of("key", {"a": "1"}, planned())
    assert (found.status, found.code, found.reason) == (FITS, "", "")
    wanted = {
        "target": "trn1n.32xlarge",
        "instances": 3,
        "cores": 96,
        "step_time_s": 8e-11,
        "step_time_low_s": 6e-11,
        "step_time_high_s": 9e-11,
        "tokens_per_s": 4e12,
        "tokens_per_step": 320,
        "mfu": 0.3,
        "hfu": 0.4,
        "exposed": 0.5,
        "bubble": 0.15,
        "peak_gib": 3.0,
        "limit_gib": 4.0,
        "goodput": 0.75,
        "confidence": "documented",
        "remat": "selective",
        "micro_batch": 4,
        "mesh": "dp_shard=12,tp=8",
        "over_gib": 0.0,
    }
    assert found.metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        exact = value if isinstance(value, str) else pytest.approx(value, rel=1e-12)
        assert found.metrics[name] == exact, name


def test_by_how_much_a_row_does_not_fit() -> None:
    over = planned(fits=False, peak_bytes=4 * GIB + GIB // 4)
    found = row_of("key", {}, over)
    assert (found.status, found.metrics["over_gib"]) == (TOO_LARGE, 0.25)
    assert found.reason == "0.25 GiB over the 4.00 GiB of a core"
    broken = planned() | {"findings": [{"severity": "error", "code": "NCC_A", "message": "why"}]}
    told = row_of("key", {}, broken)
    assert (told.status, told.code, told.reason) == (FITS, "NCC_A", "why")


def test_refusals_of_memory_are_points_that_do_not_fit() -> None:
    assert refused_row("k", {}, CapacityError("SW_CAPACITY", "too much")).status == TOO_LARGE
    found = refused_row("k", {}, CompileError("SW_A", "why"))
    assert (found.status, found.code, found.reason, found.metrics) == (REFUSED, "SW_A", "why", {})


def figures(key: str, status: str = FITS, **metrics: Any) -> Row:
    return Row(key, {}, status, metrics=metrics)


def test_which_way_figures_are_better() -> None:
    higher = {name for name, metric in METRICS.items() if metric.higher}
    assert higher == {"tokens_per_s", "mfu", "mbu"}
    assert set(METRICS) - higher == {
        "step_time_s",
        "usd_per_1e6_tokens",
        "exposed",
        "peak_gib",
        "days",
        "usd",
    }


def test_rows_are_ordered_by_what_fits_and_then_by_the_figure() -> None:
    rows = [
        figures("refused", REFUSED),
        figures("none", mfu=None),
        figures("low", mfu=0.2),
        figures("large", TOO_LARGE, mfu=0.9),
        figures("high", mfu=0.3),
    ]
    names = [row.key for row in ordered(rows, METRICS["mfu"])]
    assert names == ["high", "low", "none", "large", "refused"]


def test_the_front_keeps_what_is_better_in_one_of_two() -> None:
    """Step time against memory: (1, 5), (2, 3), (3, 3), (4, 2); equal memory and slower is
    beaten."""
    points = {"a": (1.0, 5.0), "b": (2.0, 3.0), "c": (3.0, 3.0), "d": (4.0, 2.0), "e": (5.0, None)}
    rows = [figures(k, step_time_s=x, peak_gib=y) for k, (x, y) in points.items()]
    rows.append(figures("f", TOO_LARGE, step_time_s=0.5, peak_gib=0.5))
    rows.append(figures("g", step_time_s=0.5, peak_gib=None))  # first, and of no figure
    front = pareto(rows, METRICS["step_time_s"], METRICS["peak_gib"])
    assert [row.key for row in front] == ["a", "b", "d"]


# Scaling


def scaled(mode: str, count: int, tokens_per_s: float, status: str = FITS) -> Row:
    values = {"mode": mode, "target": "a", "instances": str(count)}
    return Row("", values, status, metrics={"tokens_per_s": tokens_per_s})


def test_efficiency_is_tokens_per_instance_against_the_first() -> None:
    """300 per instance on 1; 1,080 on 4 are 270 each: 90 %; 1,920 on 8 are 240: 80 %; the curves of
    two modes have their own first."""
    rows = [scaled("weak", 1, 300.0), scaled("weak", 8, 1920.0), scaled("weak", 4, 1080.0)]
    rows += [scaled("strong", 2, 500.0), scaled("strong", 4, 750.0)]
    weak, strong = curves(rows)
    found = [row.metrics["efficiency"] for row in weak.rows.values()]
    assert found == pytest.approx([1.0, 0.9, 0.8], rel=1e-12)
    found = [row.metrics["efficiency"] for row in strong.rows.values()]
    assert found == pytest.approx([1.0, 0.75], rel=1e-12)


def test_where_nothing_fits_the_smallest_answer_is_the_base() -> None:
    (curve,) = curves([scaled("weak", 2, 200.0, TOO_LARGE), scaled("weak", 1, 50.0, TOO_LARGE)])
    assert curve.rows[2].metrics["efficiency"] == pytest.approx(2.0)


@pytest.mark.parametrize(("speed", "alike"), [(100.09, True), (100.11, False)])
def test_machines_within_a_thousandth_are_alike(speed: float, alike: bool) -> None:
    rows = []
    for target, tokens in (("a", 100.0), ("b", speed)):
        values = {"mode": "weak", "target": target, "instances": "1"}
        rows.append(Row("", values, FITS, metrics={"tokens_per_s": tokens}))
    (found,) = orders(curves(rows), METRICS["tokens_per_s"])
    assert found.order == ((("b", "a"),) if alike else (("b",), ("a",)))


def test_samples_bound_data_ranks_and_the_rest_is_tensor_parallel() -> None:
    """1,024 cores with tp 2: 512 data ranks for 256 samples, so twice as many cores per rank."""
    assert mesh_sizes({"dp_shard": AUTO, "tp": 2}, 1024, 0, 256) == {"dp_shard": 256, "tp": 4}
    assert mesh_sizes({"dp_shard": AUTO, "tp": 2}, 1024, 0, 512) == {"dp_shard": 512, "tp": 2}
    assert mesh_sizes({"dp_shard": AUTO}, 1024, 0, 256) == {"dp_shard": 256, "tp": 4}
    assert mesh_sizes({"dp_shard": AUTO}, 1024, 512) == {"dp_shard": 512, "dp_replicate": 2}
    assert mesh_sizes({"dp_shard": AUTO}, 512, 512) == {"dp_shard": 512}
    assert mesh_sizes({"dp_shard": AUTO, "tp": 8, "ep": 4}, 64) == {
        "dp_shard": 8,
        "tp": 8,
        "ep": 4,
    }


# Tries


def tried(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return tries._measured(planned(**changes), base)


def test_changes_are_per_token() -> None:
    """From 4 to 5e12 tokens/s a token takes 4/5 of the time; from 2.0 to 1.7 USD 15 % less."""
    found = tried(planned(), tokens_per_s=5e12, usd=1.7)
    assert found["time_change"] == pytest.approx(-0.2, rel=1e-12)
    assert found["cost_change"] == pytest.approx(-0.15, rel=1e-12)
    assert (found["global_batch"], found["same_batch"], found["status"]) == (64, True, "fits")
    assert found["helps"] and gain(found) == pytest.approx(-0.2)
    free = tried(planned(usd=None), usd=1.7)
    assert (free["cost_change"], free["unpriced"]) == (None, False)
    unpriced = tried(planned(), usd=None)
    assert (unpriced["cost_change"], unpriced["unpriced"]) == (None, True)


@pytest.mark.parametrize(
    ("base", "changes", "helps"),
    [
        ({}, {"tokens_per_s": 4e12 / 0.985}, True),  # 1.5 % less time
        ({}, {"tokens_per_s": 4e12 / 0.995}, False),  # 0.5 % less: not worth a change
        ({}, {"tokens_per_s": 3e12, "usd": 1.9}, True),  # slower and 5 % cheaper
        ({}, {"tokens_per_s": 3e12}, False),
        ({}, {"tokens_per_s": 8e12, "fits": False}, False),
        ({"fits": False}, {"tokens_per_s": 1e12, "usd": 9.0}, True),  # it fits, at any price
    ],
)
def test_what_helps(base: dict[str, Any], changes: dict[str, Any], helps: bool) -> None:
    assert tried(planned(**base), **changes)["helps"] is helps


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens_per_s": 4e12 / 0.985}, "next"),
        ({"tokens_per_s": 4e12 / 0.995}, "gains <1 %"),  # 0.5 % less time
        ({"tokens_per_s": 3e12, "usd": 1.99}, "gains <1 %"),  # slower and 0.5 % cheaper
        ({"tokens_per_s": 4e12 / 0.995, "usd": None}, "gains <1 %"),
        ({}, "no gain"),
        ({"tokens_per_s": 3.99e12, "usd": 2.01}, "no gain"),
        ({"tokens_per_s": 4e12 / 0.995, "fits": False}, "no gain"),
    ],
)
def test_a_gain_that_is_not_worth_a_change_is_a_gain(changes: dict[str, Any], told: str) -> None:
    assert title(tried(planned(), **changes)) == told


TOLD = {"code": "NCC_EXTP004", "message": "too many", "severity": "warning", "hint": ""}
MORE = TOLD | {"code": "NCC_EBVF030"}


@pytest.mark.parametrize(
    ("before", "after", "tokens_per_s", "helps"),
    [
        ([TOLD], [], 3.9e12, True),  # slower, and the vendor's compiler takes it
        ([TOLD], [TOLD], 3.9e12, False),
        ([MORE, TOLD], [TOLD], 3.9e12, False),  # slower, and refused all the same
        ([MORE, TOLD], [TOLD], 5e12, True),
        ([TOLD], [TOLD], 5e12, True),
        ([], [TOLD], 5e12, False),  # faster, if it could be compiled
    ],
)
def test_a_refusal_that_goes_helps_and_one_that_comes_does_not(
    before: list[Any], after: list[Any], tokens_per_s: float, helps: bool
) -> None:
    base = planned() | {"findings": before}
    found = tries._measured(planned(tokens_per_s=tokens_per_s) | {"findings": after}, base)
    assert found["refused"] == [row["code"] for row in after] and found["helps"] is helps


def test_what_the_vendor_takes_is_before_what_is_faster() -> None:
    base = planned() | {"findings": [TOLD]}
    taken = tries._measured(planned(tokens_per_s=3e12), base)
    faster = tries._measured(planned(tokens_per_s=8e12) | {"findings": [TOLD]}, base)
    assert tries._rank(taken) < tries._rank(faster)


def test_tries_are_ranked_by_fit_and_gain() -> None:
    base = planned()
    rows = [
        tries._without_answer(ExecutionError("SW_X", "died")),
        tries._without_answer(CompileError("SW_Y", "no")),
        tried(base, fits=False, tokens_per_s=9e12),
        tried(base, tokens_per_s=4.4e12),
        tried(base, tokens_per_s=4e12, usd=1.0),
    ]
    ranks = [tries._rank(row) for row in rows]
    assert [order for order, _, _ in ranks] == [3, 2, 1, 0, 0]
    assert ranks[4] < ranks[3] < ranks[2] and ranks[2][2] == 0.0
    assert [row.get("code") for row in rows[:2]] == ["SW_X", "SW_Y"]


@pytest.mark.parametrize(
    ("full", "half", "texts"),
    [
        (90, 190, ["strategy.remat=full"]),
        (149, 190, ["strategy.remat=full", "strategy.micro_batch=1 strategy.remat=full"]),
        (151, 190, ["strategy.micro_batch=1 strategy.remat=full"]),
        (149, 100, ["strategy.micro_batch=1"]),
    ],
)
def test_recomputation_is_planned_where_an_estimate_alone_does_not_rule_it_out(
    full: int, half: int, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of 200 bytes of 100: `full` is expected to take so many, half the samples so many, and
    both 80. Above 1.5 times the limit nobody hopes for more."""
    ideas = [Idea({"strategy.remat": "full"}), Idea({"strategy.micro_batch": 1})]
    ideas.append(Idea({"cluster.target": "trn2.48xlarge"}))  # saves most, and is another machine
    peaks = {("full", 2): full, ("auto", 1): half, ("full", 1): 80, ("auto", 2): 101}
    monkeypatch.setattr(tries, "saving", lambda _: ideas)

    def expected(job: JobConfig) -> tuple[float, int]:
        return peaks[job.strategy.remat, job.strategy.micro_batch], 100

    monkeypatch.setattr(tries, "estimates", lambda *_: nullcontext(expected))
    job = JobConfig(strategy=replace(DEFAULTS, remat="auto", micro_batch=2))
    memory = {"limit_bytes": 100, "peak_bytes": 200, "estimate": {"peak_bytes": 200}}
    now = Situation(job=job, mesh={"dp_shard": 32}, global_batch=64, num_microbatches=1)
    found = tries._fitting(job, now, memory)
    assert [" ".join(sorted(change.text.split())) for change in found] == texts


@pytest.mark.parametrize(
    ("spent", "took", "count"),
    [
        (0.5, 8.0, 1),
        (0.5, 4.0, 2),
        (0.5, 15.0, 1),
        (0.5, 16.0, 0),
        (4.5, 10.5, 0),
        (11.6, 0.1, 0),
        (0.0, 0.01, 2),
    ],
)
def test_as_many_tries_as_will_be_over(
    spent: float, took: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try takes 0.7 of what the job took without its capture of 2 s, and 11.5 s there are in
    all. 11 s are enough for one of 5.6 or 10.5 s, for none of 11.2 s, for three of 2.8 s and so
    the two that are wanted; 7 s for none of 7.35 s."""
    monkeypatch.setattr(tries.time, "perf_counter", lambda: 100.0 + spent)
    stages = {"capture": 1.5, "import": 0.5, "compile": took}
    report = {"provenance": {"stages_s": stages}, "findings": [], "memory": {"fits": True}}
    assert tries.affordable(AUTO, report, 100.0) == count
    refused = report | {"findings": [{"code": "NCC_EXTP004"}]}
    assert tries.affordable(AUTO, refused, 100.0) == max(count, 1)
    large = report | {"memory": {"fits": False}}
    assert tries.affordable(AUTO, large, 100.0) == max(count, 2)
    assert tries.affordable(0, refused, 100.0) == 0
    assert tries.affordable(7, report, 100.0) == 7


def test_micro_batches_follow_from_the_mesh() -> None:
    """64 samples on 4 x 2 data ranks, 1 per micro-batch: 8."""
    now = Situation(job=JobConfig(), mesh={"dp_shard": 32}, global_batch=64, num_microbatches=2)
    after = tries._after(now, {"mesh.dp_shard": 4, "mesh.dp_replicate": 2, "mesh.tp": 4})
    assert (after.global_batch, after.num_microbatches) == (64, 8)
    assert tries._after(now, {"strategy.global_batch": 16}).num_microbatches == 1


# Comparisons


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (4.0, 5.0, "+25.0 %"),
        (5.0, 4.0, "-20.0 %"),
        (1.0, 9.99, "+899.0 %"),
        (1.0, 10.0, "x 10"),
        (2.0, 2.0, ""),
        (0, 3, "new"),
        (None, 3, ""),
        (3, 0, "-100.0 %"),
    ],
)
def test_changes_in_words(a: float | None, b: float | None, text: str) -> None:
    assert compare.change({"a": a, "b": b}) == text


def test_collectives_of_a_kind_add_up() -> None:
    """2 of 100 bytes and 3 of 10: 230 bytes; times are those of all runs already."""
    row = {"kind": "all_gather", "axis": "tp", "algorithm": "ring"}
    rows = [
        row | {"count": 2, "bytes": 100, "time_ps": 7, "exposed_ps": 5},
        row | {"count": 3, "bytes": 10, "time_ps": 11, "exposed_ps": 0},
        row | {"axis": "pp", "count": 1, "bytes": 1, "time_ps": 1, "exposed_ps": 1},
    ]
    found = compare._by_kind(rows)
    assert found["all_gather tp (ring)"] == {
        "count": 5,
        "bytes": 230,
        "time_ps": 18,
        "exposed_ps": 5,
    }
    assert len(found) == 2


def test_amounts_of_both_and_of_one() -> None:
    found = compare._both({"x": 1, "y": 0, "z": 4}, {"x": 2, "y": 0, "w": 3})
    assert found == [
        {"name": "x", "a": 1, "b": 2},
        {"name": "z", "a": 4, "b": 0},
        {"name": "w", "a": 0, "b": 3},
    ]


def test_collectives_that_differ_are_shown_from_both_sides() -> None:
    row = {"axis": "tp", "algorithm": "ring", "count": 1, "bytes": 8, "time_ps": 3}
    same = row | {"kind": "all_gather", "exposed_ps": 2}
    first, second = (row | {"kind": kind, "exposed_ps": 1} for kind in ("permute", "all_reduce"))
    found = compare._collectives(
        {"collectives": [same, first]}, {"collectives": [same, second, second]}
    )
    none = {"count": 0, "bytes": 0, "time_ps": 0, "exposed_ps": 0}
    once = {"count": 1, "bytes": 8, "time_ps": 3, "exposed_ps": 1}
    twice = {"count": 2, "bytes": 16, "time_ps": 6, "exposed_ps": 2}
    assert found == [
        {"name": "permute tp (ring)", "a": once, "b": none},
        {"name": "all_reduce tp (ring)", "a": none, "b": twice},
    ]
