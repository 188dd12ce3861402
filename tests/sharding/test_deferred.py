"""Gradients that are reduced once, after the last micro-batch: the same step, less traffic, larger
accumulators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.analysis import MAX_EVALUATED
from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.types import Graph, Op, tensor_type
from shardwright.compiler.neff.schedule import flat
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.compiler.rewriting.driver import in_programs
from shardwright.orchestrator.models import gpt
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.layers import Precision
from shardwright.sharding.cut.overlap.ends import reduced_in_last
from shardwright.sharding.cut.rewrites import SUMMED
from shardwright.sharding.cut.summed import summed
from shardwright.sharding.partition.mesh import DATA_AXES
from shardwright.sharding.plan import Plan
from shardwright.sharding.settings import StrategySettings
from tests.support.cells import diagonals, long_in_matrix
from tests.support.road import worst
from tests.support.staged_runs import captured, plan_of, state_after, step_errors
from tests.support.strategy_cells import DISTRIBUTIONS, MODELS, PIPELINE_MODELS, Distribution

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


def _loops(plan: Plan, program: str) -> list[Op]:
    (graph,) = (p.graph for p in plan.step.programs if p.name == program)
    return [op for op in graph.ops if op.name == "loop"]


def _reducing(loop: Op) -> int:
    return sum(op.name in REDUCTIONS for op in loop.regions[0].ops)


@pytest.fixture
def small_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients of these models are added up, and so reduced, in the loop, small as they are."""

    def all_of_them(graph: Graph, fused: bool) -> Graph:
        return summed(graph, fused, 0)

    with monkeypatch.context() as patch:
        patch.setattr("shardwright.sharding.plan.SUMMED", replace(SUMMED, run=all_of_them))
        plan_of.cache_clear()
        yield
    plan_of.cache_clear()


@pytest.mark.parametrize(
    ("model", "name"),
    long_in_matrix(CELLS, [CELLS[1], CELLS[3]], [CELLS[2], CELLS[4]]),
)
def test_one_reduction_per_step(model: str, name: str) -> None:
    last = _told(name, "last")
    leaf, error = worst(step_errors(MODELS[model], last, MICRO_BATCHES))
    assert error <= BOUND, leaf
    each, once, after = (
        plan_of(MODELS[model], _told(name, when), MICRO_BATCHES)
        for when in ("each", "last", "after")
    )
    assert _reductions(each, "backward")
    assert not _reductions(once, "backward") + _reductions(after, "backward")
    moved = _reductions(after, "update") - _reductions(once, "update")
    assert _reductions(once, "backward.last") == moved
    assert moved.total() < _reductions(each, "backward").total()


def test_accumulators_are_whole_until_then() -> None:
    """Beside them the last backward pass leaves shards to the update."""
    each, last, after = (
        plan_of(MODELS["gqa"], _told("fsdp 4", when), MICRO_BATCHES)
        for when in ("each", "last", "after")
    )
    assert _gradient_bytes(after) == 4 * _gradient_bytes(each)
    assert _gradient_bytes(last) == 5 * _gradient_bytes(each)


def test_sums_over_copies_are_reduced_in_their_accumulators() -> None:
    last, after = (
        plan_of(MODELS["bert"], _told("data parallel 4", when), MICRO_BATCHES)
        for when in ("last", "after")
    )
    assert last.step.buffers == after.step.buffers


BACKWARD = """
backward(%sum: tensor<4xbf16>, %gradient: tensor<4xbf16>) {
  %total = add %sum, %gradient : tensor<4xbf16>
  return %total
}
"""
UPDATE = """
update(%sum: tensor<4xbf16>) {
  %wide = convert %sum {dtype=f32} : tensor<4xf32>
  %all = all_reduce %wide {axes=[dp_replicate], reduction=add, group_size=2} : tensor<4xf32>
  %new = negate %all : tensor<4xf32>
  %zeros = constant 0.0 : tensor<4xbf16>
  return %new, %zeros
}
"""


def test_a_short_accumulator_does_not_take_what_is_reduced_in_fp32() -> None:
    """That waits in a buffer of its own type: the accumulator's would round it."""
    backward, update = parse(BACKWARD), parse(UPDATE)
    roles = {"gradient/w": "gradient", "g": "batch", "w": "parameter"}
    kinds = {"gradient/w": "bf16", "g": "bf16", "w": "f32"}
    buffers = {
        name: BufferInfo(name=name, role=role, local_type=kind, global_type=kind, axes=((),))
        for name, role in roles.items()
        for kind in [tensor_type((4,), DType(kinds[name]))]
    }
    programs = (
        StepProgram(
            name="backward",
            graph=backward,
            inputs=("gradient/w", "g"),
            outputs=("gradient/w",),
        ),
        StepProgram(
            name="update", graph=update, inputs=("gradient/w",), outputs=("w", "gradient/w")
        ),
    )
    step = StepPlan(
        mesh={"dp_replicate": 2},
        buffers=buffers,
        programs=programs,
        schedules=(((("backward",), 2), (("update",), 1)),),
        num_microbatches=2,
    )
    found = {p.name: p for p in reduced_in_last(step).programs}
    assert found["backward.last"].outputs == found["update"].inputs == ("reduced/w",)
    assert found["update"].graph.inputs[0].type == tensor_type((4,), DType.F32)


KNOBS: dict[str, dict[str, int | bool]] = {
    "as they are": {},
    "late": {"late_reduce_scatter_shift": 1},
    "shifts": {"early_all_gather_shift": 1, "late_reduce_scatter_shift": 1, "bucket_mb": 1},
    "groups": {"layers_per_group": 2},
    "unfused": {"gradient_accumulation_fusion": False},
}
KNOB_CELLS = [(name, knobs) for name in ("fsdp 4", "hsdp 8") for knobs in KNOBS]


@pytest.mark.usefixtures("small_too")
@pytest.mark.parametrize(("name", "knobs"), diagonals(KNOB_CELLS, 2, KNOB_CELLS[:1]))
def test_the_last_backward_pass_reduces_layer_by_layer_and_changes_no_bit(
    name: str, knobs: str
) -> None:
    """Sums are made in the order in which the update makes them where it reduces."""
    after, last = _told(name, "after"), _told(name, "last", **KNOBS[knobs])
    data = after.mesh.size(DATA_AXES)
    found = [
        state_after(plan_of(MODELS["gqa"], how, 2).step, captured(MODELS["gqa"], 2 * data))
        for how in (after, last)
    ]
    assert found[0] == found[1]
    plan = plan_of(MODELS["gqa"], last, 2)
    assert any(map(_reducing, _loops(plan, "backward.last")))
    assert not any(map(_reducing, _loops(plan, "backward.first")))


@pytest.mark.usefixtures("small_too")
@pytest.mark.parametrize("name", ["fsdp 4", "hsdp 8", "data parallel 4"])
def test_overlap_treats_them_as_those_of_every_backward_pass(name: str) -> None:
    """A layer late: the first of two layers reduces nothing, beside the second what the first
    made is reduced; so it is with accumulators that are reduced in place.
    """
    each, last = (
        plan_of(MODELS["gqa"], _told(name, when, late_reduce_scatter_shift=1), 2)
        for when in ("each", "last")
    )
    found = [(loop.attrs.trip, bool(_reducing(loop))) for loop in _loops(last, "backward.last")]
    assert found == [(1, False), (1, True)]
    assert found == [(loop.attrs.trip, bool(_reducing(loop))) for loop in _loops(each, "backward")]


BF16, F32 = {DType.BF16}, {DType.F32}


@pytest.mark.parametrize(
    ("when", "dtype", "program", "expected"),
    [
        ("each", "auto", "backward", BF16),
        ("last", "auto", "backward.last", BF16),
        ("last", "float32", "backward.last", F32),
        ("after", "auto", "update", F32),
        ("after", "bfloat16", "update", BF16),
    ],
)
def test_gradients_of_layers_are_reduced_in_the_type_they_are_made_in_or_asked_for(
    when: str, dtype: str, program: str, expected: set[DType]
) -> None:
    """Those of a model that computes in bf16 beside fp32 weights; what is reduced after all
    micro-batches has the type of its sum, as scripts of published runs have it."""
    sizes = Sizes(layers=2, hidden=128, heads=2, head_dim=64, ffn=512, vocab=64, positions=16)
    settings = StrategySettings(name="fsdp", reduce_gradients=when, reduce_dtype=dtype)
    how = Distribution(settings, (("dp_shard", 4),))
    options = TaskOptions(seq_len=16, precision=Precision(activations="bf16"))
    plan = plan_of(lambda: gpt.train_task(sizes, options), how, MICRO_BATCHES)
    (graph,) = (p.graph for p in plan.step.programs if p.name == program)
    large = [op for op in graph.walk() if op.name == "reduce_scatter" and op.result.type.rank > 1]
    stacks = [op for op in large if op.result.type.num_elements >= 128 * 128 // 4]
    assert stacks and {op.result.type.dtype for op in stacks} == expected


@pytest.mark.parametrize("count", [2, 4])
def test_the_first_and_the_last_run_of_backward_are_programs_of_their_own(count: int) -> None:
    plan = plan_of(MODELS["gqa"], _told("fsdp 4", "last"), count)
    (schedule,) = plan.step.schedules
    assert list(flat(schedule)) == [
        *("forward", "backward.first"),
        *("forward", "backward") * (count - 2),
        *("forward", "backward.last", "update"),
    ]
    assert {program.name for program in plan.step.programs} == set(flat(schedule))


def test_the_first_backward_pass_stores_what_others_add_and_nobody_clears_it() -> None:
    """It does not read whole accumulators, and the update writes no zeros; shards are cleared."""
    last, each = (
        plan_of(MODELS["gqa"], _told("fsdp 4", when), MICRO_BATCHES) for when in ("last", "each")
    )
    first, other, update = (
        next(p for p in last.step.programs if p.name == name)
        for name in ("backward.first", "backward", "update")
    )
    accumulators = {name for name in other.outputs if name.startswith("gradient/")}
    assert accumulators and accumulators == {n for n in first.outputs if n in accumulators}
    assert accumulators <= set(other.inputs)
    assert accumulators.isdisjoint(first.inputs) and accumulators.isdisjoint(update.outputs)
    cleared = next(p for p in each.step.programs if p.name == "update").outputs
    assert any(name.startswith("gradient/") for name in cleared)


def test_a_cast_of_a_stack_moves_into_the_loop_that_fills_it() -> None:
    """In the first backward pass of a model that computes in bf16: no whole stack is converted."""
    sizes = Sizes(layers=2, hidden=256, heads=4, head_dim=64, ffn=2048, vocab=64, positions=16)
    settings = StrategySettings(name="fsdp", reduce_gradients="last")
    how = Distribution(settings, (("dp_shard", 2),))
    options = TaskOptions(seq_len=16, precision=Precision(activations="bf16"))
    plan = plan_of(lambda: gpt.train_task(sizes, options), how, MICRO_BATCHES)
    (graph,) = (p.graph for p in plan.step.programs if p.name == "backward.first")
    stacks = {r for op in graph.ops if op.name == "loop" for r in op.results}
    casts = [op for op in graph.ops if op.name == "convert" and op.operand in stacks]
    assert all(op.result.type.num_bytes < 2**17 for op in casts)
    large = [v for v in stacks & set(graph.outputs) if v.type.num_bytes > 2**20]
    assert large and all(v.type.dtype is DType.F32 for v in large)


def _staged(model: str, schedule: str, when: str) -> StepPlan:
    settings = StrategySettings(name="fsdp", schedule=schedule, reduce_gradients=when)
    how = Distribution(settings, (("pp", 2), ("dp_shard", 2)))
    return plan_of(PIPELINE_MODELS[model], how, 4).step


@pytest.mark.parametrize(
    "schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.matrix), "interleaved"]
)
def test_what_no_stage_waits_for_is_reduced_in_the_last_backward_pass(schedule: str) -> None:
    """Of the first part of a pipeline; the others send what they make to the part before them.
    The bits are those of a step that reduces behind all of them.
    """
    own = captured(PIPELINE_MODELS["gqa"], 4)
    after, last = (_staged("gqa", schedule, when) for when in ("after", "last"))
    assert state_after(after, own) == state_after(last, own)
    runs = [list(flat(each)) for each in last.schedules]
    assert (runs[0].count("backward.0.first"), runs[0].count("backward.0")) == (1, 2)
    assert runs[0][-2:] == ["backward.0.last", "update.0"]
    assert not any(name.endswith(".last") for name in (*runs[0][:-2], *runs[1]))
    assert last.transfers == after.transfers


def test_a_tied_embedding_is_sent_before_it_is_reduced() -> None:
    """The other end of the pipeline adds its own term, and reduces the sum as before."""
    after, last = (_staged("bert", "gpipe", when) for when in ("after", "last"))
    assert any(transfer.writer == "backward.0" for transfer in last.transfers)
    assert last.schedules == after.schedules
    assert last.buffers == after.buffers


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
    assert not _stacks_added(in_programs(plan.step, SUMMED, least_bytes=0))


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
    assert _reductions(one, "backward.last")
    assert _reductions(two, "backward")
    assert _gradient_bytes(one) == 9 * _gradient_bytes(two)  # shards of what is reduced


def test_stacks_of_any_size_wait() -> None:
    """Zeros too many to be looked at one by one, and a core's share of them, are zeros."""
    sizes = Sizes(layers=2, hidden=256, heads=4, head_dim=64, ffn=4096, vocab=64, positions=16)
    assert sizes.layers * sizes.hidden * sizes.ffn > MAX_EVALUATED
    settings = StrategySettings(name="llm-training", zero=0, reduce_gradients="last")
    how = Distribution(settings, (("dp_replicate", 2), ("tp", 2)))
    plan = plan_of(lambda: gpt.train_task(sizes, TaskOptions(seq_len=16)), how, MICRO_BATCHES)
    found = _reductions(plan, "backward")
    assert not found, found
    assert _reductions(plan, "backward.last")


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
