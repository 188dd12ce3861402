"""Layers in groups: one collective for the weights of several layers; values stay.

The step without groups is the oracle bit by bit, and the unsharded graph within the bounds of
sums; counts and bytes are those of the formulas in docs/strategies/fsdp.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import ceil

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.outline import outline
from shardwright.compiler.outline.overwritten import covering_writes
from shardwright.compiler.passes.scalars import known_scalars, parameter
from shardwright.compiler.program import StepPlan
from shardwright.orchestrator.models import config_task
from shardwright.sharding.cut.overlap.assign import Shifts
from shardwright.sharding.cut.overlap.buckets import UNLIMITED
from shardwright.sharding.cut.overlap.groups import grouped
from shardwright.sharding.cut.overlap.layers import overlap
from shardwright.sharding.memory.footprint import footprint
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import traffic
from tests.support.building import Builder
from tests.support.road import captured_graph, worst
from tests.support.small_job import SIZES
from tests.support.staged_runs import Make, cut_step, plan_of, state_after, step_errors
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import (
    MODELS,
    Distribution,
    deep_flax,
    deep_gqa,
    distribution,
    model_graph,
)

BOUND = 1e-5
LAYERS = 5
MICRO_BATCHES = 2
MESHES = {"fsdp": {"dp_shard": 4}, "hsdp": {"dp_replicate": 2, "dp_shard": 2}}
DP = ("dp_shard",)
Captured = tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]


def _task() -> TrainTask:
    return config_task.train_task({**SIZES, "num_hidden_layers": LAYERS}, seq_len=8, dtype="f32")


@cache
def _captured() -> Captured:
    return captured_graph(_task(), 4)


@cache
def _step(mesh: str) -> StepPlan:
    """The step without groups, nothing moved."""
    return cut_step(_captured(), make_mesh(MESHES[mesh]), MICRO_BATCHES)


@cache
def _state(mesh: str) -> dict[str, bytes]:
    return state_after(_step(mesh), _captured())


def _in_groups(mesh: str, size: int, shift: int = 0, bucket_bytes: int = 0) -> StepPlan:
    return overlap(_step(mesh), Shifts(shift, shift), 1, bucket_bytes, False, size)


def _loops(step: StepPlan, name: str) -> list[Op]:
    graph = next(p.graph for p in step.programs if p.name == name)
    return [op for op in graph.ops if op.name == "loop"]


def _counts(graph: Graph) -> Counter[str]:
    """Collectives over data axes of one iteration."""
    return Counter(op.name for op in graph.ops if "dp_" in repr(getattr(op.attrs, "axes", ())))


def _per_step(step: StepPlan) -> Counter[tuple[str, str]]:
    rows = (row for row in traffic(step) if row.kind != "all_reduce" or "tp" not in row.axes)
    return Counter({(r.program, r.kind): r.count for r in rows if set(r.axes) & {"dp_shard"}})


@pytest.mark.parametrize(
    ("mesh", "size", "shift"),
    [("fsdp", 1, 0), ("fsdp", 2, 1), ("fsdp", LAYERS, 0), ("fsdp", 9, 1), ("hsdp", 3, 1)],
)
def test_groups_change_no_bit_and_no_byte(mesh: str, size: int, shift: int) -> None:
    """Whether or not they divide the layers."""
    found, plain = _in_groups(mesh, size, shift), _step(mesh)
    assert state_after(found, _captured()) == _state(mesh)
    bytes_of = [Counter[str](), Counter[str]()]
    for counted, step in zip(bytes_of, (found, plain), strict=True):
        for row in traffic(step):
            counted[row.kind] += row.total_bytes
    assert bytes_of[0] == bytes_of[1]


@pytest.mark.parametrize("size", [1, 2, 3, 4, LAYERS])
def test_a_group_is_one_gather_and_one_reduction(size: int) -> None:
    """ceil(L / k) collectives per pass where there were w L."""
    units = ceil(LAYERS / size)
    plain, found = _per_step(_step("fsdp")), _per_step(_in_groups("fsdp", size))
    for program, kind in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        loop = _loops(_step("fsdp"), program)[0]
        weights = _counts(loop.regions[0])[kind]
        outside = plain[program, kind] - MICRO_BATCHES * LAYERS * weights
        assert weights >= 7
        assert found[program, kind] == MICRO_BATCHES * units + outside
    for body in (op.regions[0] for op in _loops(_in_groups("fsdp", size), "backward")):
        assert _counts(body) == {"all_gather": 1, "reduce_scatter": 1}


def test_copies_add_one_sum_per_group() -> None:
    """A unit later than what it sums, so that the first unit of a loop has none."""
    plain, step = _step("hsdp"), _in_groups("hsdp", 2)
    (whole,) = _loops(plain, "backward")
    alone = MICRO_BATCHES * LAYERS * _counts(whole.regions[0])["all_reduce"]
    copies = [
        sum(r.count for r in traffic(s) if r.program == "backward" and r.axes == ("dp_replicate",))
        for s in (plain, step)
    ]
    assert copies[1] == copies[0] - alone + MICRO_BATCHES * ceil(LAYERS / 2)
    bodies = [_counts(op.regions[0]) for op in _loops(step, "backward")]
    assert {c["all_gather"] for c in bodies} == {c["reduce_scatter"] for c in bodies} == {1}
    assert {c["all_reduce"] for c in bodies} == {0, 1}


def test_groups_keep_to_the_size_of_buckets() -> None:
    bodies = [_loops(_in_groups("fsdp", 2, 0, size), "forward")[0].regions[0] for size in (0, 9000)]
    one, more = (_counts(body)["all_gather"] for body in bodies)
    assert one == 1 < more
    for op in (op for op in bodies[1].ops if op.attrs is not None and op.name == "all_gather"):
        assert op.result.type.num_bytes <= 9000 or not op.attrs.parts


def test_a_group_holds_the_weights_of_its_layers() -> None:
    """Each layer more in a group is one layer's gathered weights more, and its shards on the way
    into the bucket.
    """
    body = _loops(_step("fsdp"), "forward")[0].regions[0]
    layer = sum(op.result.type.num_bytes for op in body.ops if op.name == "all_gather")
    peaks = [footprint(_in_groups("fsdp", size)).arena_bytes["forward"] for size in (1, 2, 3, 4)]
    for before, after in pairwise(peaks):
        assert layer <= after - before <= 1.5 * layer


CELLS: dict[str, tuple[Make, Distribution]] = {
    "kept": (
        deep_gqa,
        distribution("fsdp", layers_per_group=2, reshard_after_forward=False, dp_shard=2),
    ),
    "hybrid with tensor parallelism": (
        deep_gqa,
        distribution("fsdp", layers_per_group=3, dp_replicate=2, dp_shard=2, tp=2),
    ),
    "stages of unequal depth": (
        deep_gqa,
        distribution("fsdp", layers_per_group=2, early_all_gather_shift=1, pp=2, dp_shard=2),
    ),
    "reduced once": (
        deep_gqa,
        distribution("fsdp", layers_per_group=2, reduce_gradients="last", dp_shard=2),
    ),
    "re-rolled": (deep_flax, distribution("fsdp", layers_per_group=2, dp_shard=2)),
    "data parallel": (MODELS["bert"], distribution("generic", layers_per_group=2, dp_shard=2)),
    "experts": (MODELS["moe"], distribution("fsdp", layers_per_group=2, dp_shard=2, ep=2)),
}


MORE = ("re-rolled", "data parallel", "kept", "hybrid with tensor parallelism", "experts")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.matrix) if n in MORE else n for n in CELLS]
)
def test_values_equal_the_unsharded_step(name: str) -> None:
    make, how = CELLS[name]
    leaf, error = worst(step_errors(make, how, MICRO_BATCHES))
    assert error <= BOUND, leaf


@pytest.mark.parametrize("name", [n for n in CELLS if n not in MORE])
def test_cells_are_in_groups(name: str) -> None:
    """No cell above shows only the step as it was."""
    make, how = CELLS[name]
    alone = replace(how, settings=replace(how.settings, layers_per_group=0))
    plans = [plan_of(make, one, MICRO_BATCHES) for one in (how, alone)]
    found, plain = (sum(row.count for row in traffic(plan.step)) for plan in plans)
    assert found < plain
    assert not [f for f in plans[0].findings if "layers_per_group" in f.message]


def test_groups_without_collectives_are_said() -> None:
    how = distribution("llm-training", layers_per_group=2, tp=2)
    captured = model_graph("gqa")
    plan = build_plan(*captured, how.mesh, settings=how.settings, unit=answer_request)
    said = [f.message for f in plan.findings if f.code == "SW_OVERLAP_IDLE"]
    assert ["layers_per_group = 2" in message for message in said] == [True]


def test_a_group_is_one_function() -> None:
    """It waits for its collectives at its end: layers of their own would not run beside them."""
    step = _in_groups("fsdp", 2, shift=1)
    called = [u.name for u in outline(step).functions if u.name == "forward.loop"]
    assert len(called) == len(_loops(step, "forward"))


def test_stacks_of_groups_need_no_zeros() -> None:
    """What a loop over layers fills slice by slice is filled by its groups too."""
    names = [u.name for size in (0, LAYERS) for u in outline(_in_groups("fsdp", size)).functions]
    assert "forward.fill" not in names
    assert "backward.fill" not in names


@pytest.mark.parametrize("gap", [False, True])
def test_writes_behind_each_other_cover_a_stack(gap: bool) -> None:
    """Two writes per iteration: at 2 i and 2 i + 1, or both at 2 i."""
    b = Builder()
    stack, counter, row = b.input((6, 4)), b.input((), DType.I32), b.input((1, 4))
    zero, one, two = (b.constant(n, DType.I32) for n in range(3))
    first = b.multiply(two, counter)
    second = first if gap else b.add(first, one)
    once = b.dynamic_update_slice(stack, row, (first, zero))
    body = b.finish(b.dynamic_update_slice(once, row, (second, zero)), counter, row)
    known = known_scalars(body, {counter: parameter(0, 0, 2)})
    assert len(covering_writes(body, 0, 3, 0, known)) == (0 if gap else 2)


def test_weights_do_not_wait_in_barriers_of_a_group() -> None:
    """A barrier of recomputation ties a layer's weights to the gradient that reaches it; gathered
    with its group they cannot wait for that.
    """
    b = Builder()
    stack, gradient = b.input((4, 6)), b.input((6, 6))

    def layer(inner: Builder, index: Value, carries: Sequence[Value]) -> list[Value]:
        weights, passed = carries
        row = inner.dynamic_slice(weights, (index, inner.constant(0, DType.I32)), (1, 6))
        shard, passed = inner.barrier(inner.reshape(row, (6,)), passed)
        whole = inner.reshape(inner.all_gather(shard, 0, DP, 6), (6, 6))
        return [weights, inner.dot(passed, whole, contract=((1,), (0,)))]

    graph = b.finish(b.loop(4, [stack, gradient], layer)[1])
    (loop,) = (op for op in grouped(graph, 2, UNLIMITED).ops if op.name == "loop")
    assert loop.attrs.trip == 2
    assert _counts(loop.regions[0]) == {"all_gather": 1}
    held = [op for op in loop.regions[0].ops if op.name == "optimization_barrier"]
    assert [len(op.operands) for op in held] == [1, 1]
