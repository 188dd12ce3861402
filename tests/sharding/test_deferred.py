"""Gradients that are reduced once, after the last micro-batch: the same step, less traffic, larger
accumulators."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwright.compiler.frontend.models import gpt
from shardwright.compiler.frontend.models.blocks import Precision, Sizes, TaskOptions
from shardwright.compiler.ir.analysis import MAX_EVALUATED
from shardwright.compiler.ir.types import Op
from shardwright.compiler.program import StepPlan
from shardwright.sharding.plan import Plan
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.summed import summed_in_loops
from tests.support.cells import long_in_matrix
from tests.support.road import worst
from tests.support.staged_runs import plan_of, step_errors
from tests.support.strategy_cells import DISTRIBUTIONS, MODELS, Distribution

BOUND = 1e-5
MICRO_BATCHES = 3
REDUCTIONS = ("all_reduce", "reduce_scatter")
CELLS = [
    ("gqa", "fsdp 4"),
    ("gqa", "hsdp 8"),
    ("flax", "zero-1 8"),
    ("tied gpt", "tp zero-1 8"),
    ("bert", "data parallel 4"),
]


def _told(name: str, when: str, **more: int) -> Distribution:
    found = DISTRIBUTIONS[name]
    return replace(found, settings=replace(found.settings, reduce_gradients=when, **more))


def _reductions(plan: Plan, program: str) -> Counter[tuple[str, ...]]:
    """Reductions over data axes per step in a program, by axes."""
    found = Counter[tuple[str, ...]]()
    for row in plan.traffic:
        if row.program == program and row.kind in REDUCTIONS and "tp" not in row.axes:
            found[row.axes] += row.count
    return found


def _gradient_bytes(plan: Plan) -> int:
    buffers = plan.step.buffers.values()
    return sum(b.local_type.num_bytes for b in buffers if b.role == "gradient")


@pytest.mark.parametrize(
    ("model", "name"),
    long_in_matrix(CELLS, [c for c in CELLS if c != ("gqa", "fsdp 4")]),
)
def test_one_reduction_per_step(model: str, name: str) -> None:
    last = _told(name, "last")
    leaf, error = worst(step_errors(MODELS[model], last, MICRO_BATCHES))
    assert error <= BOUND, leaf
    plans = [plan_of(MODELS[model], how, MICRO_BATCHES) for how in (_told(name, "each"), last)]
    assert _reductions(plans[0], "backward")
    assert not _reductions(plans[1], "backward")
    assert _reductions(plans[1], "update").total() < _reductions(plans[0], "backward").total()


def test_accumulators_are_whole_until_then() -> None:
    each, last = (
        plan_of(MODELS["gqa"], _told("fsdp 4", w), MICRO_BATCHES) for w in ("each", "last")
    )
    assert _gradient_bytes(last) == 4 * _gradient_bytes(each)


def _stacks_added(step: StepPlan) -> list[Op]:
    """Sums in the backward program of a stack that a loop filled."""
    (graph,) = (p.graph for p in step.programs if p.name == "backward")
    stacks = {r for op in graph.ops if op.name == "loop" for r in op.results if r.type.rank > 1}
    return [op for op in graph.ops if op.name == "add" and stacks & set(op.operands)]


@pytest.mark.parametrize("when", ["each", "last"])
def test_no_stack_of_gradients_is_added_to_an_accumulator(when: str) -> None:
    """They are added up layer by layer, in the loop: what follows a loop adds no stack."""
    plan = plan_of(MODELS["gqa"], _told("fsdp 4", when), MICRO_BATCHES)
    assert _stacks_added(plan.step)
    assert not _stacks_added(summed_in_loops(plan.step, 0))


@pytest.mark.parametrize("fused", [True, False])
def test_the_sum_is_fused_with_what_makes_a_gradient_unless_told_otherwise(
    fused: bool,
) -> None:
    """Of weights of 2 MiB a layer; what is small is added behind the loop anyway."""
    sizes = Sizes(layers=2, hidden=256, heads=4, head_dim=64, ffn=2048, vocab=64, positions=16)
    settings = StrategySettings(name="fsdp", gradient_accumulation_fusion=fused)
    how = Distribution(settings, (("dp_shard", 2),))
    plan = plan_of(lambda: gpt.train_task(sizes, TaskOptions(seq_len=16)), how, MICRO_BATCHES)
    large = [op for op in _stacks_added(plan.step) if op.result.type.num_bytes > 2**20]
    assert bool(large) != fused


def test_one_micro_batch_has_nothing_to_wait_for() -> None:
    told = [_told("fsdp 4", when) for when in ("each", "last")]
    each, last = (plan_of(MODELS["gqa"], how, 1) for how in told)
    assert each.traffic == last.traffic
    assert _gradient_bytes(each) == _gradient_bytes(last)


def test_zero_1_reduces_once_and_zero_2_after_every_micro_batch() -> None:
    """Stage 1 shares optimizer state only, so gradients stay whole over the micro-batches."""
    one, two = (
        plan_of(MODELS["gqa"], _told("zero-1 8", "auto", zero=stage), MICRO_BATCHES)
        for stage in (1, 2)
    )
    assert not _reductions(one, "backward")
    assert _reductions(two, "backward")
    assert _gradient_bytes(one) == 8 * _gradient_bytes(two)


def test_stacks_of_any_size_wait() -> None:
    """Zeros too many to be looked at one by one, and a core's share of them, are zeros."""
    sizes = Sizes(layers=2, hidden=256, heads=4, head_dim=64, ffn=4096, vocab=64, positions=16)
    assert sizes.layers * sizes.hidden * sizes.ffn > MAX_EVALUATED
    settings = StrategySettings(name="llm-training", zero=0, reduce_gradients="last")
    how = Distribution(settings, (("dp_replicate", 2), ("tp", 2)))
    plan = plan_of(lambda: gpt.train_task(sizes, TaskOptions(seq_len=16)), how, MICRO_BATCHES)
    found = _reductions(plan, "backward")
    assert not found, found
    assert _reductions(plan, "update")


def test_accumulators_may_have_the_type_of_the_gradients() -> None:
    sizes = Sizes(layers=2, hidden=32, heads=2, head_dim=16, ffn=64, vocab=64, positions=16)
    short = Precision(params="bf16", activations="bf16")
    options = TaskOptions(seq_len=16, precision=short)

    def types(how: str) -> tuple[set[str], set[str]]:
        settings = StrategySettings(name="generic", zero=0, accumulate_dtype=how)
        on = Distribution(settings, (("dp_replicate", 2),))
        buffers = plan_of(lambda: gpt.train_task(sizes, options), on, 2).step.buffers.values()
        roles = ("gradient", "metric")
        gradients, metrics = (
            {
                b.local_type.dtype.value
                for b in buffers
                if b.role == role and b.initial == "zeros" and b.local_type.dtype.is_float
            }
            for role in roles
        )
        return gradients, metrics

    assert types("auto") == ({"bf16"}, {"f32"})
    assert types("float32") == ({"f32"}, {"f32"})
