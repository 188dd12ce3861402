"""A step cut in two or three programs, written down: their buffers, what each reads and writes, in
which type sums are added up, and by what their mean is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph, Value, tensor_type
from shardwright.compiler.program import StepPlan, StepProgram
from shardwright.sharding.cut.gradients import StepView, ancestors, depends_on
from shardwright.sharding.cut.stages import (
    _accumulate,
    _elementwise_sources,
    _follows_from,
    _Part,
    _take_mean,
    _wide,
    split_step,
)
from shardwright.sharding.linearity import Kind, Label
from shardwright.sharding.linearity.labels import SUM
from shardwright.sharding.localize import Localized, localize
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from tests.support.partitioned import partitioned

F32, BF16, F64 = DType.F32, DType.BF16, DType.F64
ROWS, WIDTH = 6, 4


def step(dtype: DType = F32, batch_dim: int = 0) -> Localized:
    """w - sum of x over its rows, and beside it a sum of squares; w has 4 elements, x 6 rows."""
    b = Builder()
    w = b.input((WIDTH,), dtype)
    x = b.input((ROWS, WIDTH) if batch_dim == 0 else (WIDTH, ROWS), dtype)
    total = b.reduce(x, "add", (batch_dim,))
    loss = b.reduce(b.multiply(x, x), "add", (0, 1))
    new = b.op("subtract", w, b.multiply(total, w))
    inputs = Slot("w", "parameter"), Slot("x", "batch", batch_dim)
    outputs = Slot("w", "parameter"), Slot("loss", "metric")
    part = partitioned(b.finish(new, loss), make_mesh({"dp_shard": 1}), None, inputs, outputs)
    return localize(part)


def program(plan: StepPlan, name: str) -> StepProgram:
    return next(p for p in plan.programs if p.name == name)


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


def numbers(graph: Graph) -> list[float]:
    """What constants repeat."""
    found = [op for op in graph.ops if op.name == "constant"]
    types = (op.attrs.type.dtype.numpy for op in found)
    return [
        float(np.frombuffer(op.attrs.data, dtype)[0])
        for op, dtype in zip(found, types, strict=True)
    ]


def buffers(plan: StepPlan) -> dict[str, tuple[str, str, str]]:
    return {b.name: (b.role, str(b.local_type), b.initial) for b in plan.buffers.values()}


def test_one_micro_batch_hands_over_what_it_computes() -> None:
    """Without accumulators; that is what is asked for where nothing is said."""
    plan = split_step(step(), wide=True)
    assert plan.num_microbatches == 1 and plan.schedules == (
        ((("forward", "backward", "update"), 1),),
    )
    assert buffers(plan) == {
        "w": ("parameter", "tensor<4xf32>", "given"),
        "x": ("batch", "tensor<6x4xf32>", "given"),
        "loss": ("metric", "tensor<f32>", "computed"),
        "gradient/w": ("gradient", "tensor<4xf32>", "computed"),
    }
    forward, backward, update = plan.programs
    assert (forward.inputs, forward.outputs) == (("x",), ("loss",))
    assert (backward.inputs, backward.outputs) == (("x",), ("gradient/w",))
    assert (update.inputs, update.outputs) == (("w", "gradient/w"), ("w",))
    assert [names(p.graph) for p in plan.programs] == [
        ["multiply", "reduce"],
        ["reduce"],
        ["multiply", "subtract"],
    ]


@pytest.mark.parametrize(("wide", "kept"), [(True, "f32"), (False, "bf16")])
def test_several_micro_batches_add_up_in_accumulators(wide: bool, kept: str) -> None:
    """Short gradients in fp32 or as they are, metrics in fp32; of three the mean is a third."""
    plan = split_step(step(BF16), num_microbatches=3, wide=wide)
    assert plan.schedules == (((("forward", "backward"), 3), (("update",), 1)),)
    found = buffers(plan)
    assert found["gradient/w"] == ("gradient", f"tensor<4x{kept}>", "zeros")
    assert found["accumulator/loss"] == ("metric", "tensor<f32>", "zeros")
    forward, backward, update = plan.programs
    assert set(forward.outputs) == {"accumulator/loss"} < set(forward.inputs)
    assert set(backward.outputs) == {"gradient/w"} < set(backward.inputs)
    assert names(backward.graph) == ["reduce", *["convert"] * wide, "add"]
    assert names(forward.graph) == ["multiply", "reduce", "convert", "add"]
    assert set(update.outputs) == {"loss", "accumulator/loss", "gradient/w", "w"}
    assert sorted(numbers(update.graph)) == [0.0, 0.0, *[pytest.approx(1 / 3, rel=2**-8)] * 2]
    assert names(update.graph).count("convert") == 1 + wide
    for read, written in ((backward, "gradient/w"), (update, "w")):
        place = read.outputs.index(written)
        given = plan.buffers[written].local_type
        assert read.graph.outputs[place].type == given


def test_parts_of_sums_are_added_up_even_of_one_micro_batch() -> None:
    """Traced with two samples, of which one is there: the mean is over half as many."""
    local = step()
    for count, share in ((1, 2.0), (2, 1.0), (4, 0.5)):
        plan = split_step(local, num_microbatches=count, wide=True, partial=frozenset())
        assert "accumulator/loss" in plan.buffers
        assert sorted(numbers(program(plan, "update").graph)) == [0.0, 0.0, share, share]


@pytest.mark.parametrize("count", [0, -1])
def test_less_than_a_micro_batch_is_refused(count: int) -> None:
    with pytest.raises(ShardingError, match=f"requires 1 or more, got {count}"):
        split_step(step(), num_microbatches=count, wide=True)


def test_samples_may_lie_along_any_dim() -> None:
    """A sum over the other one is no sum over samples."""
    plan = split_step(step(batch_dim=1), num_microbatches=2, wide=True)
    assert "gradient/w" in plan.buffers
    b = Builder()
    w, x = b.input((ROWS,)), b.input((WIDTH, ROWS))
    graph = b.finish(b.op("subtract", w, b.reduce(x, "add", (0,))))
    for dim in (1, 0):
        slots = (Slot("w", "parameter"), Slot("x", "batch", dim))
        local = localize(partitioned(graph, make_mesh({"dp_shard": 1}), None, slots, slots[:1]))
        if dim == 0:
            assert "gradient/w" in split_step(local, num_microbatches=2, wide=True).buffers
            continue
        with pytest.raises(ShardingError, match="holds single samples"):
            split_step(local, num_microbatches=2, wide=True)


def with_state(*outputs: Slot, shape: tuple[int, ...] | None = None) -> StepPlan:
    """A step of a weight and a key, both of which it changes by a sum over its batch."""
    b = Builder()
    w, key, x = b.input((4,)), b.input((4,)), b.input((6, 4))
    total = b.reduce(x, "add", (0,))
    graph = b.finish(b.add(w, total), b.multiply(key, total))
    inputs = Slot("w", "parameter", shape=shape), Slot("key", "rng"), Slot("x", "batch", 0)
    part = partitioned(graph, make_mesh({"dp_shard": 1}), None, inputs, outputs)
    return split_step(localize(part), num_microbatches=2, wide=True)


def test_outputs_are_state_in_its_buffer_or_a_buffer_of_their_own() -> None:
    """Random state is state; state of a new name begins as what a program writes; what is no state
    may not have the name of something else. The user's sizes are those of the whole."""
    plan = with_state(Slot("w", "parameter"), Slot("key", "rng"), shape=(3,))
    assert set(program(plan, "update").outputs) >= {"w", "key"}
    assert set(buffers(plan)) == {"w", "key", "x", "gradient/w"}
    assert plan.buffers["w"].global_type == tensor_type((3,), F32)
    assert plan.buffers["w"].local_type == tensor_type((4,), F32)
    plan = with_state(Slot("w", "parameter"), Slot("other", "optimizer"))
    assert buffers(plan)["other"] == ("optimizer", "tensor<4xf32>", "computed")
    assert "other" in program(plan, "update").outputs
    with pytest.raises(ShardingError, match="distinct names, got key twice"):
        with_state(Slot("w", "parameter"), Slot("key", "metric"))


def test_a_gradient_of_another_shape_than_its_parameter_is_of_each_core_alone() -> None:
    """A weight of 4, read as 2 x 2, whose gradient has 2: the first of the step, and none of the
    weight, whose name is that number."""
    b = Builder()
    w, x = b.input((4,)), b.input((6, 2))
    total = b.reduce(x, "add", (0,))
    graph = b.finish(b.add(w, b.reshape(b.broadcast(total, (2, 2), (1,)), (4,))))
    slots = (Slot("0", "parameter"), Slot("x", "batch", 0))
    part = partitioned(graph, make_mesh({"dp_shard": 1}), None, slots, slots[:1])
    plan = split_step(localize(part), num_microbatches=2, wide=True)
    (gradient,) = (b for b in plan.buffers.values() if b.role == "gradient")
    assert gradient.name == "gradient/0"
    assert (gradient.local_type, gradient.axes) == (tensor_type((2,), F32), ((),))
    assert gradient.global_type == gradient.local_type


def test_a_batch_without_a_sample_dim_has_its_samples_along_the_first() -> None:
    b = Builder()
    w, x = b.input((4,)), b.input((6, 4))
    graph = b.finish(b.add(w, b.reduce(x, "add", (0,))))
    slots = (Slot("w", "parameter"), Slot("x", "batch"))
    part = partitioned(graph, make_mesh({"dp_shard": 1}), None, slots, slots[:1])
    assert "gradient/w" in split_step(localize(part), num_microbatches=2, wide=True).buffers


def test_a_sum_that_a_metric_takes_in_is_handed_over_by_forward() -> None:
    """x times its sum, which is the gradient: nothing is left for a program of its own."""
    b = Builder()
    w, x = b.input((4,)), b.input((6, 4))
    total = b.reduce(x, "add", (0,))
    beside = b.reduce(b.multiply(x, b.broadcast(total, (6, 4), (1,))), "add", (0, 1))
    inputs = (Slot("w", "parameter"), Slot("x", "batch", 0))
    outputs = (inputs[0], Slot("beside", "metric"))
    graph = b.finish(b.add(w, total), beside)
    local = localize(partitioned(graph, make_mesh({"dp_shard": 1}), None, inputs, outputs))
    plan = split_step(local, wide=True)
    assert [(p.name, p.inputs, p.outputs) for p in plan.programs] == [
        ("forward", ("x",), ("gradient/w", "beside")),
        ("update", ("w", "gradient/w"), ("w",)),
    ]
    assert plan.schedules == (((("forward", "update"), 1),),)
    several = split_step(local, num_microbatches=2, wide=True)
    forward, _ = several.programs
    assert set(forward.outputs) == {"gradient/w", "accumulator/beside"} < set(forward.inputs)


def test_part_of_a_sum_that_only_a_metric_reads_is_refused_too() -> None:
    """As where it is squashed before it is a sum."""
    b = Builder()
    w, x = b.input((4,)), b.input((6, 4))
    near = b.op("negate", x)
    loss = b.reduce(b.op("tanh", near), "add", (0, 1))
    graph = b.finish(b.add(w, b.reduce(x, "add", (0,))), loss)
    inputs = (Slot("w", "parameter"), Slot("x", "batch", 0))
    outputs = (inputs[0], Slot("loss", "metric"))
    local = localize(partitioned(graph, make_mesh({"dp_shard": 1}), None, inputs, outputs))
    partial = frozenset((local.values[near],))
    with pytest.raises(ShardingError, match="SW_ONE_SAMPLE"):
        split_step(local, num_microbatches=2, wide=True, partial=partial)


# Pieces


def test_accumulators_are_fp32_or_wider() -> None:
    for given, wide in ((BF16, F32), (F32, F32), (F64, F64), (DType.I32, F32)):
        assert _wide(tensor_type((3, 2), given)) == tensor_type((3, 2), wide)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_value_is_added_where_it_is_made(narrow: bool) -> None:
    """And zeros come back where the mean is taken."""
    b = Builder()
    value = b.op("negate", b.input((2,), BF16 if narrow else F32))
    wide = tensor_type((2,), F32)
    part = _Part("backward")
    _accumulate(part, "sum", value, wide)
    _accumulate(part, "again", value, wide)
    ((before, name), (other, again)) = part.extra_inputs.items()
    assert (name, before.type, again, other.type) == ("sum", wide, "again", wide)
    assert list(part.after) == [value]
    once = part.after[value][: 1 + narrow]
    assert [op.name for op in part.after[value]] == ["convert"] * narrow + ["add"] + (
        ["convert"] * narrow + ["add"]
    )
    addend = once[0].result if narrow else value
    assert once[-1].operands == (before, addend) and addend.type == wide
    assert part.outputs == [("sum", once[-1].result), ("again", part.after[value][-1].result)]

    mean = Value(value.type)
    update = _Part("update")
    _take_mean(update, "sum", mean, wide, 8)
    ((total, name),) = update.extra_inputs.items()
    assert (name, total.type) == ("sum", wide)
    assert [op.name for op in update.before] == [
        "constant",
        "multiply",
        *["convert"] * narrow,
        "constant",
    ]
    share, scaled, zeros = update.before[0], update.before[1], update.before[-1]
    assert scaled.operands == (total, share.result) and scaled.result.type == wide
    assert share.attrs.data == np.full(1, 0.125, np.float32).tobytes()
    assert share.attrs.type == zeros.attrs.type == wide and not any(zeros.attrs.data)
    assert (update.before[2].result if narrow else scaled.result) is mean
    assert update.outputs == [("sum", zeros.result)]


def test_a_program_reads_what_it_uses_in_the_order_of_the_step() -> None:
    """What is handed through without an op is read too."""
    b = Builder()
    first, second, third = b.input((2,)), b.input((2,)), b.input((2,))
    made, own = b.op("negate", third), Value(first.type)
    (op,) = b.ops
    part = _Part("p", [op], [("out", made), ("same", second)], {own: "own"})
    given = {first: "first", second: "second", third: "third"}
    found = part.finish(given)
    assert (found.inputs, found.outputs) == (("second", "third"), ("out", "same"))
    assert found.graph.inputs == (second, third) and found.graph.outputs == (made, second)
    assert (found.name, found.graph.name) == ("p", "p")
    part.outputs.append(("more", own))
    assert part.finish(given).inputs == ("second", "third", "own")


def made(build: Any) -> tuple[Graph, dict[str, Value]]:
    b = Builder()
    values = build(b)
    return b.finish(*values.values()), values


def test_what_a_value_needs_and_what_it_is_computed_from_element_by_element() -> None:
    def build(b: Builder) -> dict[str, Value]:
        x = b.input((2, 2))
        cut = b.op("negate", x)
        other = b.op("tanh", x)
        row = b.reduce(x, "add", (0,))
        turned = b.transpose(other, (1, 0))
        both = b.add(b.multiply(cut, cut), turned)
        last = b.add(both, b.broadcast(row, (2, 2), (1,)))
        return {"cut": cut, "other": other, "row": row, "turned": turned, "last": last}

    graph, values = made(build)
    cut, other, row, last = (values[n] for n in ("cut", "other", "row", "last"))
    ops = [op.name for op in graph.ops]
    assert [op.name for op in ancestors(graph, [last])] == ops
    needed = [op.name for op in ancestors(graph, [last], stop={cut, row})]
    assert needed == ["tanh", "transpose", "multiply", "add", "broadcast_in_dim", "add"]
    assert ancestors(graph, [cut], stop={cut}) == [] == ancestors(graph, [])
    view = StepView(graph, graph.producers(), {}, set())
    # Once, on however many ways; not behind a transpose; not of another shape, as what selects.
    assert _elementwise_sources(view, last, {cut, other, row}) == [cut]
    assert _elementwise_sources(view, values["turned"], {other, values["turned"]}) == [
        values["turned"]
    ]
    assert _elementwise_sources(view, last, set(graph.inputs)) == list(graph.inputs)


def test_what_selects_an_element_is_no_source_of_it() -> None:
    b = Builder()
    first, norm = b.input((3,)), b.input(())
    is_large = b.compare(norm, b.full((), 1.0), "GT")
    kept = b.op("select", is_large, first, b.full((3,), 0.0))
    graph = b.finish(kept)
    view = StepView(graph, graph.producers(), {}, set())
    assert _elementwise_sources(view, kept, {first, norm}) == [first]


def test_a_source_that_is_met_on_two_ways_is_one() -> None:
    b = Builder()
    source = b.input((3,))
    both = b.add(b.op("negate", source), b.op("tanh", source))
    graph = b.finish(both)
    view = StepView(graph, graph.producers(), {}, set())
    assert _elementwise_sources(view, both, {source}) == [source]


def test_what_follows_from_a_cut() -> None:
    """All ways from the batch lead through it; one that holds single samples on its way does not,
    and what no batch reaches follows from anything."""
    b = Builder()
    x, w = b.input((6, 4)), b.input((4,))
    samples = b.op("tanh", x)
    cut, other = b.reduce(samples, "add", (0,)), b.reduce(x, "add", (0,))
    behind, beside, alone = b.multiply(cut, w), b.add(cut, other), b.op("negate", w)
    graph = b.finish(behind, beside, alone)
    labels = dict.fromkeys((cut, other, behind, beside), SUM) | {samples: Label(Kind.SAMPLE)}
    view = StepView(graph, graph.producers(), labels, depends_on(graph, [x]))
    assert _follows_from(view, behind, {cut}) and _follows_from(view, alone, {cut})
    assert not _follows_from(view, beside, {cut}) and _follows_from(view, beside, {cut, other})
    assert not _follows_from(view, cut, {other})
    assert _follows_from(view, samples, {samples}) and not _follows_from(view, x, {cut})
