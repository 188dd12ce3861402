"""Layers are shared out so that the longest stage is as short as it can be, by cost and not by
number, and the report says so."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import config_task
from shardwright.sharding.cut.pipeline.assignment import assign
from shardwright.sharding.cut.pipeline.balance import by_stage, shares
from tests.support.staged_runs import captured, step_errors
from tests.support.strategy_cells import deep_flax, deep_gqa, distribution


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_shorter_longest_part(costs: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    scaled = [cost * len(costs) * 100 / sum(costs) for cost in costs]  # on the grid of the search
    scaled = [float(round(cost)) for cost in scaled]
    found = shares(scaled, count)
    assert len(found) == count and sum(found) == len(costs) and min(found) >= 1

    def longest(sizes: list[int]) -> float:
        ends = [0, *itertools.accumulate(sizes)]
        return max(sum(scaled[a:b]) for a, b in itertools.pairwise(ends))

    cuts = itertools.combinations(range(1, len(costs)), count - 1)
    others = [[b - a for a, b in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts]
    grain = len(costs) * sum(scaled) / len(costs) / 100  # what rounding may hide
    assert longest(found) <= min(longest(sizes) for sizes in others) + grain


def test_equal_layers_go_to_the_first_parts() -> None:
    assert shares([1.0] * 5, 4) == [2, 1, 1, 1]
    assert shares([1.0] * 8, 4) == [2, 2, 2, 2]
    assert shares([1.0] * 7, 3) == [3, 2, 2]


def wide_vocabulary() -> TrainTask:
    """Eight layers and a head that costs more than two of them."""
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "head_dim": 8,
    }
    return config_task.train_task(config, seq_len=8, dtype="f32", remat="full")


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    parts = assign(*captured(wide_vocabulary, 2), 4).shares
    sizes = [part.layers for part in parts]
    assert sizes[-1] == 1 and sum(sizes) == 8
    equal = assign(*captured(wide_vocabulary, 2), 4, "layers").shares
    assert [part.layers for part in equal] == [2, 2, 2, 2]
    assert max(part.cost for part in parts) < max(part.cost for part in equal)
    assert sum(part.cost for part in parts) == pytest.approx(1.0)


@pytest.mark.parametrize("make", [deep_gqa, deep_flax])
def test_scanned_and_unrolled_layers_are_weighed(make) -> None:
    parts = assign(*captured(make, 2), 2).shares
    assert sum(part.cost for part in parts) == pytest.approx(1.0)
    assert max(part.cost for part in parts) < 0.75


def test_values_with_layers_moved_by_cost() -> None:
    errors = step_errors(wide_vocabulary, distribution("llm-training", pp=4), 2)
    assert max(errors.values()) <= 1e-5


def test_parts_of_interleaved_stages_are_shown_together() -> None:
    parts = assign(*captured(wide_vocabulary, 2), 4).shares
    rows = by_stage(parts, 2)
    assert [row["layers"] for row in rows] == [
        [parts[0].layers, parts[2].layers],
        [parts[1].layers, parts[3].layers],
    ]
