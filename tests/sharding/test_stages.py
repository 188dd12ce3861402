"""Steps written by hand, cut and run over ranks: what is accumulated, what crosses, what is
refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.analysis import count_ops
from shardwright.compiler.ir.ops import ReduceWindowAttrs, ScatterAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.program import StepPlan
from shardwright.compiler.support.min_cut import UNCUTTABLE, FlowNetwork
from shardwright.sharding.cut.stages import split_step
from shardwright.sharding.linearity import Kind, label_values
from shardwright.sharding.localize import localize
from shardwright.sharding.partition.mesh import Mesh, make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sim_cluster.values.result import distance
from tests.support.building import Builder
from tests.support.partitioned import partitioned, run_global
from tests.support.reference_ranks import ReferenceRanks

ONE = make_mesh({"dp_shard": 1})
DP = make_mesh({"dp_shard": 2})
S, N = ("dp_shard",), ()
ROWS, WIDTH = 8, 4
RNG = np.random.default_rng(0)
LOC = Loc("model.py", 41)
STATE = (Slot("w", "parameter"), Slot("m", "optimizer"))
IN = (*STATE, Slot("x", "batch", 0))
OUT = (*STATE, Slot("loss", "metric"))


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


class Step(Builder):
    """Weight and momentum [WIDTH, WIDTH], batch [rows, WIDTH]: mean of tanh(x w)^2, by hand."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__(loc=LOC)
        self.rows = rows
        self.w, self.m = self.input((WIDTH, WIDTH)), self.input((WIDTH, WIDTH))
        self.x = self.input((rows, WIDTH))

    def scaled(self, a: Value, factor: float) -> Value:
        return self.multiply(a, self.full(a.type.shape, factor))

    def forward(self) -> tuple[Value, Value]:
        """Loss and the gradient of the product."""
        y = self.op("tanh", self.dot(self.x, self.w))
        loss = self.scaled(self.reduce(self.multiply(y, y), "add", (0, 1)), 1 / self.rows)
        slope = self.op("subtract", self.full(y.type.shape, 1.0), self.multiply(y, y))
        return loss, self.scaled(self.multiply(y, slope), 2 / self.rows)

    def gradient(self, dy: Value) -> Value:
        return self.dot(self.x, dy, ((0,), (0,)))

    def momentum(self, grad: Value) -> tuple[Value, Value]:
        """New weight and momentum; the squares make the update non-linear."""
        m = self.add(self.scaled(self.m, 0.9), self.multiply(grad, grad))
        root = self.op("sqrt", self.add(m, self.full(m.type.shape, 1e-3)))
        return self.op("subtract", self.w, self.op("divide", grad, root)), m


def plain_step(rows: int = ROWS) -> Graph:
    b = Step(rows)
    loss, dy = b.forward()
    w, m = b.momentum(b.gradient(dy))
    return b.finish(w, m, loss)


def cut(graph: Graph, count: int = 1, mesh: Mesh = ONE, **options: object) -> StepPlan:
    part = partitioned(graph, mesh, None, IN, OUT)
    return cut_part(part, count, **options)


def cut_part(part: PartitionedGraph, count: int = 1, **options: object) -> StepPlan:
    plan = split_step(localize(part), num_microbatches=count, wide=True, **options)
    for program in plan.programs:
        verify(program.graph)
    return plan


def run(
    plan: StepPlan, state: Mapping[str, np.ndarray], steps: Sequence[np.ndarray]
) -> ReferenceRanks:
    ranks = ReferenceRanks(plan, state)
    for x in steps:
        ranks.run_step([{"x": piece} for piece in np.split(x, plan.num_microbatches)])
    return ranks


def same_as_whole_batch(
    make: Callable[[int], Graph], count: int, plan: StepPlan, num_steps: int = 2
) -> None:
    """`count` micro-batches of `make(ROWS)` equal one step of `make(count * ROWS)`."""
    whole = make(count * ROWS)
    state = {"w": floats(WIDTH, WIDTH), "m": np.abs(floats(WIDTH, WIDTH))}
    data = [floats(count * ROWS, WIDTH) for _ in range(num_steps)]
    ranks = run(plan, state, data)
    expected = [state["w"], state["m"]]
    for x in data:
        *expected, loss = run_global(whole, [*expected, x])
    for name, value in zip(("w", "m", "loss"), (*expected, loss), strict=True):
        assert distance(ranks.gather(name), value) <= 1e-6, name


def roles(plan: StepPlan) -> dict[str, str]:
    return {info.name: info.role for info in plan.buffers.values()}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_micro_batches_equal_the_whole_batch(count: int) -> None:
    plan = cut(plain_step(), count)
    assert [p.name for p in plan.programs] == ["forward", "backward", "update"]
    assert "gradient/w" in plan.buffers
    same_as_whole_batch(plain_step, count, plan)


@pytest.mark.parametrize("place", ["gradient", "loss"])
def test_parts_of_sums_become_sums_on_every_way(place: str) -> None:
    """On that to a gradient and on that to a metric; what no micro-batch computes may be one."""
    b = Step()
    loss, dy = b.forward()
    scaled = b.scaled(dy, 2.0)
    w, m = b.momentum(b.gradient(scaled))
    per_sample = {"gradient": dy, "loss": b.ops[0].result}[place]
    local = localize(partitioned(b.finish(w, m, loss), ONE, None, IN, OUT))

    def cut_with(part: Value) -> None:
        split_step(local, num_microbatches=2, wide=True, partial=frozenset((local.values[part],)))

    with pytest.raises(ShardingError, match="SW_ONE_SAMPLE"):
        cut_with(per_sample)
    cut_with(m)


def test_one_micro_batch_has_no_accumulators() -> None:
    plan = cut(plain_step())
    assert plan.schedules == (((("forward", "backward", "update"), 1),),)
    assert {info.initial for info in plan.buffers.values()} == {"given", "computed"}
    assert "accumulator/loss" not in plan.buffers


def test_accumulators_are_fp32_start_and_end_as_zeros() -> None:
    plan = cut(plain_step(), 2)
    assert plan.schedules == (((("forward", "backward"), 2), (("update",), 1)),)
    names = {n for n, info in plan.buffers.items() if info.initial == "zeros"}
    assert names == {"gradient/w", "accumulator/loss"}
    ranks = run(plan, {"w": floats(WIDTH, WIDTH), "m": floats(WIDTH, WIDTH) ** 2}, [floats(16, 4)])
    assert not ranks.gather("gradient/w").any()
    assert not ranks.gather("accumulator/loss").any()
    assert ranks.gather("loss") > 0


def test_buffers_of_a_batch_describe_one_micro_batch() -> None:
    plan = cut(plain_step(), 3)
    assert plan.buffers["x"].local_type.shape == (ROWS, WIDTH)


def test_the_cut_comes_after_casts_and_before_optimizer_arithmetic() -> None:
    b = Step()
    loss, dy = b.forward()
    narrow = b.convert(b.gradient(dy), DType.BF16)
    grad = b.convert(narrow, DType.F32)
    w = b.op("subtract", b.w, b.scaled(grad, 0.1))  # linear to the end: the cut may move
    plan = cut(b.finish(w, b.m, loss), 2)
    update = next(p.graph for p in plan.programs if p.name == "update")
    assert "convert" not in [op.name for op in update.ops]
    backward = next(p.graph for p in plan.programs if p.name == "backward")
    assert sum(op.name == "convert" for op in backward.ops) == 2
    state = {"w": floats(WIDTH, WIDTH), "m": floats(WIDTH, WIDTH)}
    x = floats(2 * ROWS, WIDTH)
    forward_only = run(plan, state, [])
    forward_only.micro_batches = [{"x": x[:ROWS]}]
    for name in ("forward", "backward"):
        assert not list(forward_only.run(0, name, 0))
    whole = evaluate(b.finish(grad), [state["w"], state["m"], x[:ROWS]])
    np.testing.assert_allclose(forward_only.gather("gradient/w"), whole[0], rtol=1e-6)


def test_two_gradients_of_one_weight_share_one_accumulator() -> None:
    def make(rows: int) -> Graph:
        b = Step(rows)
        loss, dy = b.forward()
        other = b.transpose(b.dot(dy, b.x, ((0,), (0,))), (1, 0))
        w, m = b.momentum(b.add(b.gradient(dy), other))
        return b.finish(w, m, loss)

    plan = cut(make(ROWS), 2)
    assert [n for n, r in roles(plan).items() if r == "gradient"] == ["gradient/w"]
    same_as_whole_batch(make, 2, plan)


def test_a_smaller_sum_is_accumulated_before_it_is_broadcast() -> None:
    def make(rows: int) -> Graph:
        b = Step(rows)
        loss, dy = b.forward()
        small = b.reduce(dy, "add", (0,))
        w, m = b.momentum(b.broadcast(small, (WIDTH, WIDTH), (1,)))
        return b.finish(w, m, loss)

    plan = cut(make(ROWS), 2)
    (gradient,) = [i for i in plan.buffers.values() if i.role == "gradient"]
    assert gradient.local_type.shape == (WIDTH,)
    same_as_whole_batch(make, 2, plan)


def test_clipping_by_norm_stays_after_the_cut() -> None:
    def make(rows: int) -> Graph:
        b = Step(rows)
        loss, dy = b.forward()
        grad = b.gradient(dy)
        norm = b.op("sqrt", b.reduce(b.multiply(grad, grad), "add", (0, 1)))
        w, m = b.momentum(b.op("divide", grad, b.broadcast(norm, grad.type.shape)))
        return b.finish(w, m, loss)

    plan = cut(make(ROWS), 2)
    roots = {p.name: count_ops(p.graph).get("sqrt", 0) for p in plan.programs}
    assert roots["backward"] == 0 and roots["update"] == 2, "the norm is that of the whole batch"
    same_as_whole_batch(make, 2, plan)


def test_metrics_of_the_gradient_are_computed_by_update() -> None:
    b = Step()
    _, dy = b.forward()
    grad = b.gradient(dy)
    w, m = b.momentum(grad)
    norm = b.op("sqrt", b.reduce(b.multiply(grad, grad), "add", (0, 1)))
    plan = cut(b.finish(w, m, norm), 2)
    assert [p.name for p in plan.programs] == ["backward", "update"]
    assert "accumulator/loss" not in plan.buffers


def test_a_metric_that_is_no_sum_is_a_mean_with_a_note() -> None:
    b = Step()
    loss, dy = b.forward()
    w, m = b.momentum(b.gradient(dy))
    plan = cut(b.finish(w, m, b.op("exponential", loss)), 2)
    (finding,) = plan.metadata["findings"]
    assert finding.code == "SW_STAGES_MEAN"
    assert finding.loc == LOC


def loops_step(rows: int) -> Graph:
    """Three layers in a loop forward and a loop backward, activations and gradients stacked."""
    b = Builder(loc=LOC)
    w, m = b.input((3, WIDTH, WIDTH)), b.input((3, WIDTH, WIDTH))
    x = b.input((rows, WIDTH))
    saved = b.full((3, rows, WIDTH), 0.0)

    def layer(inner: Builder, w: Value, i: Value) -> Value:
        zero = inner.constant(0, DType.I32)
        return inner.reshape(inner.dynamic_slice(w, [i, zero, zero], (1, 4, 4)), (4, 4))

    def forward(inner: Builder, i: Value, carries: tuple[Value, ...]) -> Sequence[Value]:
        h, w, stack = carries
        zero = inner.constant(0, DType.I32)
        kept = inner.reshape(h, (1, rows, WIDTH))
        stack = inner.dynamic_update_slice(stack, kept, [i, zero, zero])
        return inner.op("tanh", inner.dot(h, layer(inner, w, i))), w, stack

    def backward(inner: Builder, i: Value, carries: tuple[Value, ...]) -> Sequence[Value]:
        dh, w, stack, grads = carries
        zero = inner.constant(0, DType.I32)
        at = inner.op("subtract", inner.constant(2, DType.I32), i)
        h = inner.reshape(inner.dynamic_slice(stack, [at, zero, zero], (1, rows, 4)), (rows, 4))
        weight = layer(inner, w, at)
        y = inner.op("tanh", inner.dot(h, weight))
        slope = inner.op("subtract", inner.full(y.type.shape, 1.0), inner.multiply(y, y))
        dz = inner.multiply(dh, slope)
        dw = inner.reshape(inner.dot(h, dz, ((0,), (0,))), (1, 4, 4))
        grads = inner.dynamic_update_slice(grads, dw, [at, zero, zero])
        return inner.dot(dz, weight, ((1,), (1,))), w, stack, grads

    h, _, stack = b.loop(3, [x, w, saved], forward)
    squares = b.reduce(b.multiply(h, h), "add", (0, 1))
    loss = b.multiply(squares, b.full((), 1 / rows))
    dh = b.multiply(h, b.full(h.type.shape, 2 / rows))
    grads = b.loop(3, [dh, w, stack, b.full((3, WIDTH, WIDTH), 0.0)], backward)[3]
    new_m = b.add(b.multiply(m, b.full(m.type.shape, 0.9)), b.multiply(grads, grads))
    return b.finish(b.op("subtract", w, b.multiply(grads, new_m)), new_m, loss)


def test_gradients_stacked_by_a_loop_are_accumulated() -> None:
    plan = cut(loops_step(ROWS), 2)
    assert plan.buffers["gradient/w"].local_type.shape == (3, WIDTH, WIDTH)
    assert sum(r == "residual" for r in roles(plan).values()) == 2  # the stack and the last h
    state = {"w": floats(3, 4, 4), "m": floats(3, 4, 4)}
    x = floats(2 * ROWS, WIDTH)
    ranks = run(plan, state, [x])
    expected = run_global(loops_step(2 * ROWS), [state["w"], state["m"], x])
    for name, value in zip(("w", "m", "loss"), expected, strict=True):
        assert distance(ranks.gather(name), value) <= 1e-6, name


def per_sample_step() -> Graph:
    b = Step()
    loss, dy = b.forward()
    w, _ = b.momentum(b.gradient(dy))
    return b.finish(w, b.slice(b.x, (0, 0), (WIDTH, WIDTH)), loss)


def test_state_that_keeps_samples_refuses_micro_batches_with_the_line() -> None:
    with pytest.raises(ShardingError) as caught:
        cut(per_sample_step(), 2)
    assert caught.value.code == "SW_STAGES_CUT"
    assert caught.value.loc == LOC
    assert "slice" in str(caught.value)
    assert "single samples" in str(caught.value)
    assert "one sample in all" not in str(caught.value)


def test_what_cannot_be_cut_runs_as_one_program() -> None:
    plan = cut(per_sample_step())
    assert [p.name for p in plan.programs] == ["step"]
    assert plan.metadata["findings"][0].code == "SW_STAGES_CUT"
    state = {"w": floats(WIDTH, WIDTH), "m": floats(WIDTH, WIDTH)}
    x = floats(ROWS, WIDTH)
    np.testing.assert_array_equal(run(plan, state, [x]).gather("m"), x[:WIDTH])
    b = Step()
    loss, _ = b.forward()
    kept = b.slice(b.x, (0, 0), (WIDTH, WIDTH))
    (step,) = cut(b.finish(b.w, kept, loss)).programs
    assert step.outputs == ("m", "loss")  # w stays as it is


def test_per_sample_outputs_need_one_micro_batch() -> None:
    b = Step()
    _, dy = b.forward()
    w, m = b.momentum(b.gradient(dy))
    graph = b.finish(w, m, dy)
    assert cut(graph).programs[0].name == "forward"
    with pytest.raises(ShardingError, match="output loss"):
        cut(graph, 2)


def test_unchanged_state_needs_no_code_and_names_must_differ() -> None:
    b = Step()
    loss, dy = b.forward()
    w = b.op("subtract", b.w, b.gradient(dy))
    plan = cut(b.finish(w, b.m, loss))
    assert all("m" not in p.inputs + p.outputs for p in plan.programs)
    part = partitioned(b.finish(w, b.m, loss), ONE, None, IN, (*STATE, Slot("x", "metric")))
    with pytest.raises(ShardingError, match="got x twice"):
        cut_part(part)


def gathered_step() -> PartitionedGraph:
    """FSDP by hand: a weight shard gathered, used forward and backward, its gradient scattered."""
    b = Builder(loc=LOC)
    w, m, x = b.input((4, 4)), b.input((4, 4)), b.input((ROWS, 4))
    whole = b.all_gather(w, 0, S)
    z = b.dot(x, whole)
    y = b.op("tanh", z)
    squares = b.multiply(y, y)
    loss = b.all_reduce(b.reduce(squares, "add", (0, 1)), S)
    back = b.dot(y, whole, ((1,), (1,)))
    dy = b.dot(back, whole)
    grad = b.reduce_scatter(b.dot(x, dy, ((0,), (0,))), 0, S)
    moved = b.multiply(grad, grad)
    graph = b.finish(b.op("subtract", w, moved), b.add(m, moved), loss)
    sharded = [w, m, x, z, y, squares, back, dy, grad, moved, *graph.outputs[:2]]
    dims = dict.fromkeys(sharded, (S, N))
    return partitioned(graph, DP, dims, IN, OUT)


@pytest.mark.parametrize("reshard", [True, False])
def test_weights_are_gathered_again_or_kept(reshard: bool) -> None:
    plan = cut_part(gathered_step(), 2, reshard_after_forward=reshard)
    counts = {p.name: sum(op.name == "all_gather" for op in p.graph.ops) for p in plan.programs}
    assert counts == {"forward": 1, "backward": 1 if reshard else 0, "update": 0}
    kept = [(i.role, i.local_type.shape) for i in plan.buffers.values() if i.is_kept]
    assert kept == ([] if reshard else [("gathered", (4, 4))]) + [("residual", (ROWS // 2, 4))]
    state = {"w": floats(4, 4), "m": floats(4, 4)}
    ranks = run(plan, state, [floats(2 * ROWS, 4)])
    assert ranks.gather("gradient/w").shape == (4, 4)
    assert plan.buffers["gradient/w"].axes == (S, N)


def step_with_the_size_of_its_gradient(rows: int = ROWS) -> Graph:
    b = Step(rows)
    _, dy = b.forward()
    gradient = b.gradient(dy)
    w, m = b.momentum(gradient)
    return b.finish(w, m, b.reduce(b.multiply(gradient, gradient), "add", (0, 1)))


def test_a_metric_that_follows_from_gradients_is_computed_behind_them() -> None:
    """The squares of the mean over four micro-batches, which no micro-batch has."""
    make = step_with_the_size_of_its_gradient
    plan = cut(make(), 4)
    assert [(p.name, "loss" in p.outputs) for p in plan.programs] == [
        ("backward", False),
        ("update", True),
    ]
    same_as_whole_batch(make, 4, plan)


ALONE = ReduceWindowAttrs("max", (1, 1), (1, 1), (0, 0), (0, 0))
ADDED = ScatterAttrs(
    update_window_dims=(0, 1),
    inserted_window_dims=(),
    scatter_dims_to_operand_dims=(0,),
    index_vector_dim=0,
    kind="add",
)


@pytest.mark.parametrize(
    ("of_weights", "is_stored"),
    [
        (lambda b: b.op("reduce_window", b.w, attrs=ALONE), True),
        (lambda b: b.dot(b.w, b.w), True),
        (
            lambda b: b.op("scatter", b.w, b.constant(np.zeros(1), DType.I32), b.w, attrs=ADDED),
            True,
        ),
        (lambda b: b.loop(2, [b.w], lambda inner, _, carries: carries)[0], True),
        (lambda b: b.op("negate", b.w), False),
    ],
)
def test_dear_values_of_weights_are_stored(
    of_weights: Callable[[Step], Value], is_stored: bool
) -> None:
    b = Step()
    made = of_weights(b)
    y = b.dot(b.x, made)
    loss = b.reduce(b.multiply(y, y), "add", (0, 1))
    w, m = b.momentum(b.gradient(b.dot(y, made)))
    plan = cut(b.finish(w, m, loss))
    residuals = [i.local_type.shape for i in plan.buffers.values() if i.role == "residual"]
    assert sorted(residuals) == sorted([(ROWS, WIDTH), *([(WIDTH, WIDTH)] * is_stored)])


def test_a_collective_of_weights_is_not_repeated() -> None:
    b = Builder(loc=LOC)
    w, m, x = b.input((4, 4)), b.input((4, 4)), b.input((ROWS, 4))
    made = b.all_reduce(w, S)
    y = b.dot(x, made)
    squares = b.multiply(y, y)
    loss = b.all_reduce(b.reduce(squares, "add", (0, 1)), S)
    dy = b.dot(y, made)
    grad = b.all_reduce(b.dot(x, dy, ((0,), (0,))), S)
    graph = b.finish(b.op("subtract", w, grad), b.add(m, grad), loss)
    plan = cut_part(partitioned(graph, DP, dict.fromkeys([x, y, squares, dy], (S, N)), IN, OUT))
    residuals = [i.local_type.shape for i in plan.buffers.values() if i.role == "residual"]
    assert residuals == [(4, 4), (ROWS // 2, 4)]  # the sum of weights, and the product


@pytest.mark.parametrize(("steps", "stored"), [(0, (ROWS,)), (6, (ROWS,)), (7, (ROWS, WIDTH))])
def test_cheap_values_are_computed_again_not_stored(steps: int, stored: tuple[int, ...]) -> None:
    """A row that is spread, and what follows from it element by element; of more than six ops
    behind one that could be repeated the last is stored.
    """
    b = Step()
    row = b.reduce(b.dot(b.x, b.w), "add", (1,))
    wide = b.broadcast(row, (ROWS, WIDTH), (0,))
    for _ in range(steps):
        wide = b.op("tanh", wide)
    loss = b.reduce(wide, "add", (0, 1))
    w, m = b.momentum(b.gradient(b.multiply(wide, b.x)))
    plan = cut(b.finish(w, m, loss))
    residuals = [i.local_type.shape for i in plan.buffers.values() if i.role == "residual"]
    assert residuals == [stored]


MOVES: dict[str, Callable[[Builder, Value], Value]] = {
    "slice": lambda b, row: b.slice(
        b.broadcast(row, (ROWS, 2 * WIDTH), (0,)), (0, 0), (ROWS, WIDTH)
    ),
    "dynamic slice": lambda b, row: b.dynamic_slice(
        b.broadcast(row, (ROWS, 2 * WIDTH), (0,)),
        [b.constant(n, DType.I32) for n in (0, 1)],
        (ROWS, WIDTH),
    ),
    "reshape": lambda b, row: b.reshape(
        b.broadcast(row, (ROWS, 2, WIDTH // 2), (0,)), (ROWS, WIDTH)
    ),
    "transpose": lambda b, row: b.transpose(b.broadcast(row, (WIDTH, ROWS), (1,)), (1, 0)),
    "reverse": lambda b, row: b.reverse(b.broadcast(row, (ROWS, WIDTH), (0,)), (1,)),
    "pad": lambda b, row: b.pad(
        b.broadcast(row, (ROWS, WIDTH - 1), (0,)), b.constant(0.0), (0, 1), (0, 0)
    ),
    "concatenate": lambda b, row: b.concatenate(
        [b.broadcast(row, (ROWS, WIDTH // 2), (0,))] * 2, 1
    ),
    "barrier": lambda b, row: b.barrier(b.broadcast(row, (ROWS, WIDTH), (0,)))[0],
}


@pytest.mark.parametrize("move", MOVES)
def test_what_moves_a_row_is_done_again(move: str) -> None:
    b = Step()
    wide = MOVES[move](b, b.reduce(b.dot(b.x, b.w), "add", (1,)))
    loss = b.reduce(wide, "add", (0, 1))
    w, m = b.momentum(b.gradient(b.multiply(wide, b.x)))
    plan = cut(b.finish(w, m, loss))
    residuals = [i.local_type.shape for i in plan.buffers.values() if i.role == "residual"]
    assert residuals == [(ROWS,)]


def test_what_follows_from_batch_and_weights_by_cheap_ops_is_not_stored() -> None:
    """However many they are; the product of weights is."""
    b = Step()
    row = b.reduce(b.dot(b.w, b.w), "add", (0,))
    wide = b.add(b.x, b.broadcast(row, (ROWS, WIDTH), (1,)))
    for _ in range(8):
        wide = b.op("tanh", wide)
    loss = b.reduce(wide, "add", (0, 1))
    w, m = b.momentum(b.gradient(wide))
    plan = cut(b.finish(w, m, loss))
    residuals = [i.local_type.shape for i in plan.buffers.values() if i.role == "residual"]
    assert residuals == [(WIDTH, WIDTH)]


def test_coordinates_are_inputs_even_inside_loops() -> None:
    b = Builder()
    w, m, x = b.input((4, 4)), b.input((4, 4)), b.input((ROWS, 4))

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> Sequence[Value]:
        rank = inner.convert(inner.axis_index(S), DType.F32)
        return (inner.add(carries[0], inner.broadcast(rank, (4, 4))),)

    (moved,) = b.loop(2, [w], body)
    loss = b.all_reduce(b.reduce(x, "add", (0, 1)), S)
    graph = b.finish(w, b.add(m, moved), loss)
    part = partitioned(graph, DP, {x: (S, N)}, IN, OUT)
    plan = cut_part(part)
    assert plan.buffers["coordinate/dp_shard"].axes == (S,)
    assert "axis_index" not in [op.name for p in plan.programs for op in p.graph.walk()]
    ranks = run(plan, {"w": floats(4, 4), "m": floats(4, 4)}, [floats(ROWS, 4)])
    difference = ranks.buffers[1]["m"] - ranks.buffers[0]["m"]
    np.testing.assert_allclose(difference, 2.0, rtol=1e-5)


def label(build: Callable[[Builder, Value, Value], Value]) -> Kind:
    b = Builder()
    x, w = b.input((ROWS, 6, WIDTH)), b.input((WIDTH, WIDTH))
    value = build(b, x, w)
    return label_values(b.finish(value), {x: 0})[value].kind


def test_labels_follow_the_sample_dim() -> None:
    cases: dict[Kind, list[Callable[[Builder, Value, Value], Value]]] = {
        Kind.FREE: [lambda b, x, w: b.add(w, w)],
        Kind.ZERO: [lambda b, x, w: b.broadcast(b.constant(0.0), (3,))],
        Kind.SAMPLE: [
            lambda b, x, w: b.reduce(x, "add", (1, 2)),
            lambda b, x, w: b.reduce(b.reshape(x, (ROWS * 6, WIDTH)), "add", (1,)),
            lambda b, x, w: b.reduce(b.reshape(x, (2, ROWS // 2, 6, WIDTH)), "add", (0,)),
            lambda b, x, w: b.multiply(b.broadcast(b.reduce(x, "add", (0, 1, 2)), x.type.shape), x),
        ],
        Kind.SUM: [
            lambda b, x, w: b.reduce(x, "add", (0,)),
            lambda b, x, w: b.dot(x, x, ((0, 1), (0, 1))),
            lambda b, x, w: b.reduce(
                b.reshape(b.reshape(x, (ROWS * 6, WIDTH)), x.type.shape), "add", (0,)
            ),
            lambda b, x, w: b.dot(b.reduce(x, "add", (0,)), w),
            lambda b, x, w: b.op("negate", b.reduce(x, "add", (0, 1))),
        ],
        Kind.MIXED: [
            lambda b, x, w: b.reduce(x, "max", (0, 1, 2)),
            lambda b, x, w: b.op("tanh", b.reduce(x, "add", (0, 1))),
            lambda b, x, w: b.add(b.dot(x, x, ((0, 1), (0, 1))), w),
            lambda b, x, w: b.convert(b.reduce(x, "add", (0,)), DType.I32),
        ],
    }
    for kind, builds in cases.items():
        for i, build in enumerate(builds):
            assert label(build) is kind, (kind, i)


def scatter(b: Builder, rows: Value, updates: Value, entries: int) -> Value:
    attrs = ScatterAttrs(
        update_window_dims=(),
        inserted_window_dims=tuple(range(entries)),
        scatter_dims_to_operand_dims=tuple(range(entries)),
        index_vector_dim=1,
        kind="add",
    )
    return b.op("scatter", b.full((16, 9)[:entries], 0.0), rows, updates, attrs=attrs)


@pytest.mark.parametrize(
    ("case", "kind"),
    [("ids", Kind.SUM), ("position", Kind.SAMPLE), ("flat", Kind.SAMPLE)],
)
def test_rows_picked_by_position_keep_samples_apart(case: str, kind: Kind) -> None:
    """Token ids add samples up; a position, alone or hidden in a flat row number, does not."""
    b = Builder()
    ids, x = b.input((ROWS, 1), DType.I32), b.input((ROWS,))
    if case == "ids":
        value = scatter(b, b.op("maximum", ids, b.full((ROWS, 1), 0, DType.I32)), x, 1)
    elif case == "position":
        value = scatter(b, b.concatenate([b.iota((ROWS, 1), 0), ids], 1), x, 2)
    else:
        value = scatter(b, b.add(b.iota((ROWS, 1), 0), ids), x, 1)
    assert label_values(b.finish(value), {ids: 0, x: 0})[value].kind is kind


@st.composite
def networks(draw: st.DrawFn) -> tuple[dict[int, int], list[tuple[int, int]], set[int], set[int]]:
    n = draw(st.integers(1, 7))
    weights = {i: draw(st.integers(1, 9)) for i in range(n)}
    pairs = [(a, c) for a in range(n) for c in range(a + 1, n)]
    edges = [pair for pair in pairs if draw(st.booleans())]
    pick = st.sets(st.integers(0, n - 1), min_size=1)
    return weights, edges, draw(pick), draw(pick)


def connected(edges: Sequence[tuple[int, int]], starts: set[int], goals: set[int], cut_: set[int]):
    seen = todo = starts - cut_
    while todo:
        todo = {c for a, c in edges if a in todo} - seen - cut_
        seen = seen | todo
    return bool(seen & goals)


@settings(max_examples=200, deadline=None)
@given(networks())
def test_minimum_cut_is_a_cut_of_least_weight(
    network: tuple[dict[int, int], list[tuple[int, int]], set[int], set[int]],
) -> None:
    weights, edges, sources, sinks = network
    found = set(FlowNetwork(weights, edges, sources, sinks).minimum_cut())
    assert not connected(edges, sources, sinks, found)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(weights, k) for k in range(len(weights) + 1)
    )
    least = min(
        sum(weights[n] for n in s) for s in subsets if not connected(edges, sources, sinks, set(s))
    )
    assert sum(weights[n] for n in found) == least


def test_minimum_cut_prefers_the_sinks_and_refuses_uncuttable_paths() -> None:
    chain = [("a", "b"), ("b", "c")]
    assert FlowNetwork({"a": 5, "b": 5, "c": 5}, chain, ["a"], ["c"]).minimum_cut() == ["c"]
    with pytest.raises(ValueError, match="no node"):
        FlowNetwork({"a": UNCUTTABLE}, [], ["a"], ["a"]).minimum_cut()
