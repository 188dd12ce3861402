"""Bars, units and sentences of screens, cell by cell; the bottleneck and its shares."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.orchestrator.report.bars import (
    EMPTY,
    LIMIT,
    apportioned,
    bar,
    bar_to_limit,
)
from shardwright.orchestrator.report.bottleneck import (
    bottleneck,
    kind_of,
    kind_shares,
    last_stage,
    recomputed,
    replicated,
)
from shardwright.orchestrator.report.text import (
    count_text,
    rate_text,
    seconds_text,
    share_text,
    size_text,
    usd_text,
)

MIB, GIB = 2**20, 2**30

# Bars


@pytest.mark.parametrize(
    ("parts", "whole", "cells"),
    [
        ([1, 1, 1], 10, [4, 3, 3]),  # 3.33 each: the first of equal remainders
        ([5, 3, 2], 10, [5, 3, 2]),
        ([0.46, 0.34, 0.2], 5, [2, 2, 1]),  # 2.3, 1.7, 1.0
        ([7, 1], 4, [4, 0]),  # 3.5 and 0.5: the first
        ([1, 7], 4, [1, 3]),
        ([0, 0], 4, [0, 0]),
        ([1, 2], 0, [0, 0]),
    ],
)
def test_cells_by_largest_remainders(parts: list[float], whole: int, cells: list[int]) -> None:
    assert apportioned(parts, whole) == cells


def test_a_bar_has_its_pieces_in_order() -> None:
    assert bar({"a": 3.0, "b": 1.0, "c": 2.0}, 12).plain == "██████▓▓▒▒▒▒"


def test_what_is_free_is_dotted_and_what_is_over_is_behind_a_mark() -> None:
    """6 of 8 parts of 12 cells are 9. At 12 of 8, 11 cells and the mark behind 11 x 8 / 12 = 7.3
    of them."""
    half = {"a": 4.0, "b": 2.0}
    assert bar_to_limit(half, 8.0, 12).plain == "██████▓▓▓" + EMPTY * 3
    assert bar_to_limit({"a": 5.3}, 8.0, 12).plain == "████████" + EMPTY * 4  # 7.95 cells
    assert bar_to_limit(half, 6.0, 12).plain == "████████▓▓▓▓"
    over = bar_to_limit({"a": 8.0, "b": 4.0}, 8.0, 12).plain
    assert over == "███████" + LIMIT + "▓▓▓▓"


# Units


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (MIB - 1, "1024.00 KiB"),
        (MIB, "1.00 MiB"),
        (1.5 * MIB, "1.50 MiB"),
        (GIB, "1.00 GiB"),
        (2.25 * GIB, "2.25 GiB"),
        (GIB - 1, "1024.00 MiB"),
    ],
)
def test_sizes_in_binary_units(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2.500 s"),
        (1.0, "1.000 s"),
        (0.25, "250.000 ms"),
        (1e-3, "1.000 ms"),
        (2.5e-4, "250.0 us"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (1234.4, "$1,234"),
        (100, "$100"),
        (99.99, "$99.99"),
        (1, "$1.00"),
        (0.5, "$0.500"),
        (0.002134, "$0.00213"),
        (1e-4, "$0.000100"),
        (2.13e-5, "$2.13e-05"),
    ],
)
def test_dollars(usd: float, text: str) -> None:
    assert usd_text(usd) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2.5e18, "2.5 E"),
        (2.5e15, "2.5 P"),
        (3.03e12, "3.03 T"),
        (7e9, "7 G"),
        (999_499, "999 k"),
        (12, "12 "),
    ],
)
def test_counts_with_prefixes(number: float, text: str) -> None:
    assert count_text(number) == text


def test_shares_in_percent() -> None:
    assert share_text(3, 4) == "75 %" and share_text(0.25, digits=2) == "25.00 %"
    assert share_text(0.0005) == "0.1 %" and share_text(0.000499) == "<0.1 %"


@pytest.mark.parametrize(
    ("rate", "text", "exact"),
    [
        (0.5756, "57.6 %", "57.56 %"),
        (0.0996, "10.0 %", "9.96 %"),
        (0.0994, "9.9 %", "9.94 %"),
        (0.04, "4.0 %", "4.00 %"),
        (0.00421, "0.42 %", "0.421 %"),
        (0.000256, "0.026 %", "0.0256 %"),
        (1e-6, "<0.001 %", "<0.001 %"),
        (0, "0.0 %", "0.00 %"),
        (1, "100.0 %", "100.00 %"),
    ],
)
def test_a_utilisation_has_two_digits_at_least(rate: float, text: str, exact: str) -> None:
    assert rate_text(rate) == text and rate_text(rate, digits=2) == exact


# The bottleneck


def report(**charged: int) -> dict[str, Any]:
    return {
        "job": {
            "strategy": {"remat": "full"},
            "model": {"preset": "llama2-7b", "config": ""},
        },
        "memory": {
            "fits": True,
            "peak_bytes": 4 * GIB,
            "limit_bytes": 3 * GIB,
            "categories": {"parameters": GIB, "activations": 3 * GIB},
        },
        "timing": {
            "step_time_ps": sum(charged.values()),
            "breakdown_ps": charged,
            "engines": {
                "tensor": {"share": 0.25},
                "vector": {"share": 0.5},
                "dma_in": {"share": 0.75},
                "dma_out": {"share": 0.125},
            },
            "flops": {"model": 300, "causal": 280, "captured": 390, "executed": 400},
        },
        "collectives": [
            {
                "kind": "all_gather",
                "axis": "dp_shard(4 of 8)+ep",
                "exposed_ps": 30,
                "time_ps": 40,
                "bytes": 2 * MIB,
                "group_size": 8,
                "algorithm": "ring",
            },
            {
                "kind": "reduce_scatter",
                "axis": "dp_shard+ep",
                "exposed_ps": 20,
                "time_ps": 90,
                "bytes": MIB,
                "group_size": 8,
                "algorithm": "ring",
            },
            {
                "kind": "all_reduce",
                "axis": "tp",
                "exposed_ps": 99,
                "time_ps": 99,
                "bytes": MIB,
                "group_size": 4,
                "algorithm": "mesh",
            },
        ],
        "pipeline": {"num_microbatches": 8, "stages": [1, 2, 3, 4], "schedule": "1f1b"},
    }


def test_shares_are_of_the_step_and_the_largest_is_first() -> None:
    """Queues are busy 7/8 of the step, more than the half in which nothing computes."""
    found = kind_shares(report(compute=30, memory=50, idle=20))
    assert list(found) == ["memory", "compute", "idle", "latency"]
    assert list(found.values()) == pytest.approx([0.5, 0.3, 0.2, 0.0])


def test_collectives_are_summed_over_axes_before_they_are_compared() -> None:
    """37 of 100 are the largest category and 22 + 18 the largest kind."""
    one = report(compute=37, memory=23, collective_tp=22, collective_dp_shard_ep=18)
    found = bottleneck(one)
    assert (found["kind"], found["category"]) == ("collective", "collective_tp")
    assert found["share"] == pytest.approx(0.4)
    assert found["text"] == (
        "communication: cores wait 40 % of the step; tp 22 %, dp_shard_ep 18 %; most for"
        " all_reduce of 1.00 MiB over 4 ranks of tp (mesh), 100 % exposed"
    )
    more = report(compute=41, memory=19, collective_tp=22, collective_dp_shard_ep=18)
    assert bottleneck(more)["kind"] == "compute"


@pytest.mark.parametrize(
    ("queues", "kind", "share"),
    [(0.2, "latency", 0.4), (0.31, "memory", 0.31), (0.7, "memory", 0.6)],
)
def test_waiting_on_idle_queues_is_no_traffic(queues: float, kind: str, share: float) -> None:
    """No engine computes in 60 % of the step: what queues do not move data in is latency."""
    one = report(compute=25, memory=60, idle=15)
    engines = one["timing"]["engines"]
    engines["dma_in"]["share"], engines["dma_out"]["share"] = queues - 0.125, 0.125
    found = bottleneck(one)
    assert (found["kind"], found["category"]) == (kind, "memory")
    assert found["share"] == pytest.approx(share)
    assert found["text"].startswith("latency: 40 % " if kind == "latency" else "HBM traffic: ")


@pytest.mark.parametrize(
    ("charged", "category", "text"),
    [
        (
            {"compute": 60, "memory": 40},
            "compute",
            "compute: engines are busy 60 % of the step, the vector engine 50 %; of the FLOPs that"
            " run, 22 % are recomputation",
        ),
        (
            {"compute": 40, "memory": 60},
            "memory",
            "HBM traffic: engines wait for data 60 % of the step; queues are busy: dma_in 75 %,"
            " dma_out 12 %",
        ),
        (
            {"compute": 20, "collective_dp_shard_ep": 80},
            "collective_dp_shard_ep",
            "communication over dp_shard_ep: cores wait 80 % of the step; most for all_reduce of"
            " 1.00 MiB over 4 ranks of tp (mesh), 100 % exposed",
        ),
        (
            {"compute": 20, "bubble": 80},
            "bubble",
            "pipeline: cores wait for other stages 80 % of the step; 4 stages, 8 micro-batches,"
            " 1f1b",
        ),
        (
            {"compute": 20, "launch": 80},
            "launch",
            "launches: starting programs takes 80 % of the step, which has little work for a core",
        ),
        ({"compute": 20, "idle": 80}, "idle", "cores have nothing to do 80 % of the step"),
    ],
)
def test_the_bottleneck_in_a_sentence(charged: dict[str, int], category: str, text: str) -> None:
    found = bottleneck(report(**charged))
    assert (found["kind"], found["category"]) == (kind_of(category), category)
    assert found["share"] == pytest.approx(charged[category] / 100)
    assert found["text"] == text


def test_the_bubble_is_of_the_stage_that_finishes_last() -> None:
    """Other stages wait longer or shorter; what is limited is the step of the last one."""
    one = report(compute=20, bubble=80)
    stages = ({"compute": 60, "bubble": 40}, {"compute": 20, "bubble": 80})
    rows = [{"stage": n, "breakdown_ps": parts} for n, parts in enumerate(stages)]
    one["timing"]["per_stage"] = rows
    assert last_stage(one["timing"]) == 1
    assert bottleneck(one)["text"] == (
        "pipeline: cores of stage 1, the last to finish, wait for other stages 80 % of the step; 4"
        " stages, 8 micro-batches, 1f1b"
    )
    one["timing"]["per_stage"] = rows[1:]
    assert last_stage(one["timing"]) is None


@pytest.mark.parametrize(("captured", "told"), [(321, True), (319, False)])
def test_recomputation_above_a_twentieth_is_worth_a_word(captured: int, told: bool) -> None:
    """Of 400 that run, 20 are a twentieth; 300 are the model's."""
    one = report(compute=100)
    one["timing"]["flops"] |= {"captured": captured, "executed": 400}
    assert ("recomputation" in bottleneck(one)["text"]) is told
    one["job"]["strategy"]["remat"] = "none"
    text = bottleneck(one)["text"]
    assert "recomputation" not in text and ("beyond three forward passes" in text) is told


def test_replicas_are_told_apart_from_recomputation() -> None:
    """Of 400 that run 300 are captured: a quarter is what ranks do alike. With 350 an eighth each
    is recomputation and replicas."""
    one = report(compute=100)
    one["timing"]["flops"] |= {"captured": 300}
    text = bottleneck(one)["text"]
    assert text.endswith("; of the FLOPs that run, 25 % are of replicas or padding")
    one["timing"]["flops"] |= {"captured": 350}
    text = bottleneck(one)["text"]
    assert text.endswith(
        "; of the FLOPs that run, 12 % are recomputation, 12 % are of replicas or padding"
    )


def test_memory_that_does_not_fit_comes_first() -> None:
    one = report(compute=100)
    one["memory"]["fits"] = False
    assert bottleneck(one) == {
        "kind": "capacity",
        "category": "activations",
        "share": 0.75,
        "text": "memory: 1.00 GiB over the limit; the largest part of what a core holds is for"
        " activations, 3.00 GiB (75 %)",
    }


def test_flops_beyond_the_model_and_beyond_the_step() -> None:
    """Of 400 that run 90 are captured beyond the model's 300 and 10 run beyond the 390; what is
    less than none is none, and of nothing that runs nothing is either."""
    one = report(compute=100)
    assert (recomputed(one), replicated(one)) == (0.225, 0.025)
    one["timing"]["flops"] |= {"captured": 299, "executed": 290}
    assert (recomputed(one), replicated(one)) == (0.0, 0.0)
    one["timing"]["flops"] |= {"captured": 0, "executed": 0}
    assert (recomputed(one), replicated(one)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("model", "is_ours"),
    [
        ({"preset": "a", "config": ""}, True),
        ({"preset": "", "config": "a.json"}, True),
        ({"preset": "", "config": "", "recipe": "a"}, True),
        ({"preset": "", "config": "", "entry": "a:b"}, False),
    ],
)
def test_what_a_model_of_ours_computes_again(model: dict[str, str], is_ours: bool) -> None:
    """A setting of the job; what a step of the user's does again is its own."""
    one = report(compute=100)
    one["job"]["model"] = model
    text = bottleneck(one)["text"]
    assert ("22 % are recomputation" in text) is is_ours
    assert ("22 % are beyond three forward passes" in text) is not is_ours


def test_collectives_that_keep_nobody_waiting_are_not_named() -> None:
    """An axis without time is none; rows that are hidden, or have no time of their own, as they
    come."""
    one = report(compute=20, collective_tp=80, collective_cp=0)
    one["collectives"] = [row | {"exposed_ps": 0} for row in one["collectives"]]
    assert bottleneck(one)["text"] == "communication over tp: cores wait 80 % of the step"
    one["collectives"][0] |= {"exposed_ps": 2, "time_ps": 0}
    assert bottleneck(one)["text"].endswith("of dp_shard(4 of 8)+ep (ring), 200 % exposed")
