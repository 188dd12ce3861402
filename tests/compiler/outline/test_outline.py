"""Programs as calls: loops, repeated code and memory, all held equal to the graph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.isa.program import Call, Repeat
from shardwright.compiler.outline import outline_programs
from shardwright.compiler.program import StepProgram
from shardwright.sim_cluster.values.result import distance
from tests.support.building import Builder
from tests.support.graphs import LAYERS, layer_stack, stack_inputs
from tests.support.lowered_ranks import LoweredRanks, run_alone

RNG = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def program(graph: Graph, in_place: dict[int, int] | None = None) -> StepProgram:
    """Buffers i0, i1, ... and o0, o1, ...; output k of `in_place` has the name of its input."""
    names = [f"o{k}" for k in range(len(graph.outputs))]
    for k, i in (in_place or {}).items():
        names[k] = f"i{i}"
    inputs = tuple(f"i{i}" for i in range(len(graph.inputs)))
    return StepProgram(name="step", graph=graph, inputs=inputs, outputs=tuple(names))


def check(
    graph: Graph,
    arrays: list[np.ndarray],
    in_place: dict[int, int] | None = None,
    tolerance: float = 2e-6,
) -> LoweredRanks:
    """Run the outlined program and compare every output with the graph's reference."""
    step = program(graph, in_place)
    wanted = evaluate(graph, arrays)
    state = {f"i{i}": a for i, a in enumerate(arrays)}
    buffers, ranks = run_alone(step, state)
    for k, (name, want) in enumerate(zip(step.outputs, wanted, strict=True)):
        assert distance(want, buffers[name]) < tolerance, k
    return ranks


def calls(steps, depth: int = 0):
    """(depth, call) of every call."""
    for step in steps:
        if isinstance(step, Repeat):
            yield from calls(step.steps, depth + 1)
        else:
            yield depth, step


def names(ranks: LoweredRanks) -> list[tuple[int, str]]:
    (one,) = ranks.outlined.programs
    units = {u.key: u.name for u in ranks.outlined.functions}
    return [(depth, units[one.functions[c.function]]) for depth, c in calls(one.steps)]


def test_a_loop_is_one_function_called_in_a_repeat() -> None:
    ranks = check(layer_stack(), stack_inputs())
    inside = [name for depth, name in names(ranks) if depth == 1]
    assert inside == ["step.loop"]
    (one,) = ranks.outlined.programs
    (repeat,) = [s for s in one.steps if isinstance(s, Repeat)]
    assert repeat.trip == LAYERS
    (body,) = repeat.steps
    assert isinstance(body, Call) and body.parameters[0].terms == ((repeat.register, 1),)
    assert all(out in body.inputs for out in body.outputs), "carries are updated in place"


def swap_body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
    a, b = carries
    return b, inner.add(a, b)


def test_carries_that_trade_places() -> None:
    b = Builder()
    x, y = b.input((3, 4)), b.input((3, 4))
    graph = b.finish(*b.loop(5, [x, y], swap_body))
    check(graph, [normal(3, 4), normal(3, 4)])
    check(graph, [normal(3, 4), normal(3, 4)], {0: 0, 1: 1})


def test_first_values_shared_by_carries_and_read_after_the_loop() -> None:
    b = Builder()
    x = b.op("tanh", b.input((3, 4)))
    u, v = b.loop(4, [x, x], swap_body)
    check(b.finish(b.add(b.add(u, v), x)), [normal(3, 4)])


def test_nested_loops_pass_counters_down() -> None:
    b = Builder()
    table, x = b.input((3, 2, 4)), b.input((4,))

    def outer(level: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        def inner(deep: Builder, j: Value, values: tuple[Value, ...]) -> tuple[Value, ...]:
            y, rows, at = values
            row = deep.dynamic_slice(rows, (at, j, deep.constant(0, DType.I32)), (1, 1, 4))
            return deep.op("tanh", deep.add(y, deep.reshape(row, (4,)))), rows, at

        y, rows = carries
        back = level.op("subtract", level.constant(2, DType.I32), i)
        scaled = level.multiply(y, level.full((4,), 1.5))
        y, rows, _ = level.loop(2, [scaled, rows, back], inner)
        return level.add(y, scaled), rows

    y, _ = b.loop(3, [x, table], outer)
    ranks = check(b.finish(y), [normal(3, 2, 4), normal(4)])
    assert max(depth for depth, _ in names(ranks)) == 2


def test_what_follows_element_by_element_takes_the_place_of_what_it_follows_from() -> None:
    """A gradient on its way through the pieces of a layer is where it was carried: between them it
    needs no memory of its own."""
    b = Builder()
    x, w = b.input((8, 8)), b.input((8, 8))

    def body(level: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        value, weight = carries
        first = level.add(value, level.dot(value, weight))
        (inside,) = level.loop(2, [weight], lambda deep, _, own: (deep.op("tanh", own[0]),))
        return level.add(first, level.dot(first, inside)), weight

    value, _ = b.loop(3, [x, w], body)
    ranks = check(b.finish(value), [normal(8, 8), 0.1 * normal(8, 8)], {0: 0})
    (one,) = ranks.outlined.programs
    first, last = (c for _, c in calls(one.steps) if len(c.inputs) == 2)
    assert first.inputs[0] == first.outputs[0] == last.inputs[0] == last.outputs[0]
    assert [one.buffers[number].shape for number in one.lifetimes] == [(8, 8)], "of the loop inside"


def test_counter_as_data() -> None:
    b = Builder()
    x = b.input((5,))

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        scale = inner.broadcast(inner.convert(i, DType.F32), (5,))
        return (inner.add(carries[0], scale),)

    check(b.finish(*b.loop(4, [x], body)), [normal(5)])


def test_masks_move_into_the_loop_and_tables_stay_outside() -> None:
    b = Builder()
    x = b.input((6, 6))
    mask = b.compare(b.iota((6, 6), 0), b.iota((6, 6), 1), "GE")
    table = b.op("cosine", b.iota((6,), 0, DType.F32))
    wide = b.broadcast(table, (6, 6), (1,))

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        y, keep, factor = carries
        kept = inner.op("select", keep, y, inner.full((6, 6), 0.5))
        return inner.multiply(kept, factor), keep, factor

    y, _, _ = b.loop(3, [x, mask, wide], body)
    ranks = check(b.finish(y), [normal(6, 6)])
    (one,) = ranks.outlined.programs
    arena = [one.buffers[number].shape for number in one.lifetimes]
    assert (6,) in arena and (6, 6) not in arena


def test_unrolled_layers_are_compiled_once() -> None:
    b = Builder()
    x = b.input((4, 6))
    weights = [(b.input((6, 6)), b.input((6, 6))) for _ in range(5)]
    for first, second in weights:
        h = b.op("tanh", b.dot(x, first))
        h = b.multiply(h, b.op("logistic", h))
        g = b.op("exponential", b.op("negate", b.op("abs", b.dot(h, second))))
        x = b.add(x, b.multiply(g, h))
    arrays = [normal(4, 6), *(normal(6, 6) for _ in range(10))]
    ranks = check(b.finish(b.op("negate", x)), arrays)
    (one,) = ranks.outlined.programs
    used = [c.function for _, c in calls(one.steps)]
    assert len(used) > 4 and used.count(max(set(used), key=used.count)) >= 4


def test_updates_of_equal_shapes_share_a_function_and_happen_in_place() -> None:
    b = Builder()
    shapes = [(4, 3), (4, 3), (5,), (4, 3), (5,)]
    params, grads = [b.input(s) for s in shapes], [b.input(s) for s in shapes]
    squares = [b.reduce(b.multiply(g, g), "add", tuple(range(g.type.rank))) for g in grads]
    total = squares[0]
    for s in squares[1:]:
        total = b.add(total, s)
    norm = b.op("rsqrt", total)
    new = []
    for p, g in zip(params, grads, strict=True):
        step = b.multiply(g, b.broadcast(norm, g.type.shape))
        new.append(b.op("subtract", p, b.multiply(step, b.full(g.type.shape, 0.1))))
    arrays = [normal(*s) for s in shapes + shapes]
    ranks = check(b.finish(*new), arrays, {i: i for i in range(5)})
    (one,) = ranks.outlined.programs
    assert len(one.functions) == 5, "two sums of squares, the norm, two updates"
    assert len(list(calls(one.steps))) == 11
    assert one.bound_bytes < 4096


@pytest.mark.parametrize("added", [False, True])
def test_collectives_that_repeat_run_beside_other_code(added: bool) -> None:
    """Also where what they bring is added to an accumulator: a function of their own would wait
    for them before it returns."""
    b = Builder()
    x, w = b.input((64, 64)), b.input((64, 64))
    made = [b.dot(x, w)]
    for _ in range(3):
        total = b.all_reduce(b.input((8, 64)), ("dp_replicate",), 4)
        made.append(b.add(b.input((8, 64)), total) if added else total)
    outlined = outline_programs((program(b.finish(*made)),))
    (one,) = outlined.programs
    assert len(list(calls(one.steps))) == 1


def test_old_value_read_after_its_update_is_kept() -> None:
    b = Builder()
    p, x = b.input((4, 4)), b.input((4, 4))
    norm = b.reduce(b.multiply(x, x), "add", (0, 1))
    new = b.multiply(p, b.broadcast(norm, (4, 4)))
    change = b.reduce(new, "max", (0, 1))
    late = b.add(b.dot(p, x), b.broadcast(change, (4, 4)))
    check(b.finish(new, late), [normal(4, 4), normal(4, 4)], {0: 0})


def test_buffers_that_trade_names() -> None:
    b = Builder()
    x, y = b.input((3, 5)), b.input((3, 5))
    check(b.finish(y, x), [normal(3, 5), normal(3, 5)], {0: 0, 1: 1})
    check(b.finish(x, y), [normal(3, 5), normal(3, 5)], {0: 0, 1: 1})


def test_one_value_under_two_names_and_constants() -> None:
    b = Builder()
    x = b.input((3, 5))
    y = b.op("tanh", x)
    check(b.finish(y, y, b.reshape(y, (15,)), b.full((2,), 4.0), x), [normal(3, 5)])


def test_locations_do_not_change_a_unit() -> None:
    def units(line: int) -> list[str]:
        from shardwright.compiler.diagnostics import Loc

        b = Builder(loc=Loc("model.py", line))
        graph = b.finish(b.op("tanh", b.input((3,))))
        return [u.key for u in outline_programs((program(graph),)).functions]

    assert units(3) == units(77)


@pytest.mark.parametrize("trip", [0, 1])
def test_short_loops(trip: int) -> None:
    b = Builder()
    x, y = b.input((3, 4)), b.input((3, 4))
    check(b.finish(*b.loop(trip, [x, y], swap_body)), [normal(3, 4), normal(3, 4)])


def grow(draw, b: Builder, values: list[Value], depth: int) -> None:
    """Add an elementwise op, a contraction, or a loop whose carries go anywhere."""
    kind = draw(st.sampled_from(("unary", "binary", "dot", "norm", "loop")))
    x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
    if kind == "unary":
        values.append(b.op(draw(st.sampled_from(("tanh", "negate"))), x))
    elif kind == "binary":
        values.append(b.add(x, y))
    elif kind == "dot":
        values.append(b.op("tanh", b.dot(x, y)))
    elif kind == "norm":
        values.append(b.multiply(y, b.broadcast(b.reduce(x, "max", (0, 1)), (3, 3))))
    elif depth:
        carries = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))

        def body(inner: Builder, i: Value, given: tuple[Value, ...]) -> tuple[Value, ...]:
            inside = list(given)
            for _ in range(draw(st.integers(0, 3))):
                grow(draw, inner, inside, depth - 1)
            return tuple(draw(st.sampled_from(inside)) for _ in given)

        values += b.loop(draw(st.integers(1, 3)), carries, body)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_loops(data: st.DataObject) -> None:
    b = Builder()
    count = data.draw(st.integers(1, 3))
    values = [b.input((3, 3)) for _ in range(count)]
    values.append(b.full((3, 3), 0.25))
    for _ in range(data.draw(st.integers(1, 6))):
        grow(data.draw, b, values, 2)
    outputs = data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    targets = data.draw(st.permutations(range(max(count, len(outputs)))))
    in_place = {k: i for k, i in enumerate(targets[: len(outputs)]) if i < count}
    arrays = [normal(3, 3) for _ in range(count)]
    check(b.finish(*outputs), arrays, in_place, tolerance=1e-5)  # iteration magnifies rounding


def test_rounds_without_a_contraction_are_not_cut_apart() -> None:
    """Between equal rounds of elementwise work a large value would only pass through memory."""
    b = Builder()
    x, keys = b.input((6, 40)), [b.input((6,)) for _ in range(4)]
    for key in keys:
        wide = b.broadcast(key, x.type.shape, (0,))
        x = b.op("tanh", b.add(b.multiply(x, wide), wide))
        x = b.op("sine", b.op("abs", b.op("subtract", x, wide)))
        x = b.op("cosine", b.op("maximum", b.op("logistic", x), wide))
    graph = b.finish(x)
    assert len(outline_programs((program(graph),)).programs[0].steps) == 1
    check(graph, [normal(6, 40), *(normal(6) for _ in keys)])


def two_softmaxes() -> Graph:
    """Two equal chains from small operands to large probabilities, read together."""
    b = Builder()
    q, v, keys = b.input((96, 4)), b.input((96, 5)), [b.input((96, 4)) for _ in range(2)]
    parts = [softmax(b, b.dot(q, k, ((1,), (1,)))) for k in keys]
    return b.finish(b.dot(b.op("subtract", *parts), v))


def softmax(b: Builder, x: Value) -> Value:
    x = b.op("tanh", b.multiply(x, b.full(x.type.shape, 0.5)))
    top = b.broadcast(b.reduce(x, "max", (1,)), x.type.shape, (0,))
    e = b.op("exponential", b.op("subtract", x, top))
    return b.op("divide", e, b.broadcast(b.reduce(e, "add", (1,)), x.type.shape, (0,)))


def test_repeats_that_hand_over_much_more_than_they_read_stay_together() -> None:
    graph = two_softmaxes()
    assert len(outline_programs((program(graph),)).programs[0].steps) == 1
    check(graph, [normal(96, n) for n in (4, 5, 4, 4)])


def test_scalars_made_of_inputs_do_not_split_the_tensor_code() -> None:
    """A key mixed from two scalars is read behind a value that also stands before it."""
    b = Builder()
    x, key = b.input((8, 30)), b.input((2,))
    ends = [b.reshape(b.slice(key, (i,), (i + 1,)), ()) for i in range(2)]
    e = b.op("exponential", x)
    scaled = b.multiply(e, b.broadcast(b.add(*ends), x.type.shape))
    graph = b.finish(b.reduce(e, "add", (1,)), b.reduce(scaled, "add", (1,)))
    units = outline_programs((program(graph),)).functions
    assert all(v.type.num_elements < 8 * 30 for u in units for v in u.graph.outputs)
    check(graph, [normal(8, 30), normal(2)])


ROWS = {
    "upwards": lambda b, i, stack: (i, stack),
    "downwards": lambda b, i, stack: (b.op("subtract", b.constant(2, DType.I32), i), stack),
    "one row short": lambda b, i, stack: (i, stack),
    "always the first": lambda b, i, stack: (b.constant(0, DType.I32), stack),
    "read before": lambda b, i, stack: (i, b.op("negate", stack)),
    "clamped": lambda b, i, stack: (b.add(i, i), stack),
}


@pytest.mark.parametrize("way", ROWS)
def test_only_stacks_that_are_all_written_have_no_first_value(way: str) -> None:
    """The others keep their zeros; memory that nobody wrote holds rubbish in these runs."""
    rows = 4 if way == "one row short" else 3
    b = Builder()
    x = b.input((4,))

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        y, stack = carries
        row, stack = ROWS[way](inner, i, stack)
        y = inner.op("tanh", inner.add(y, y))
        zero = inner.constant(0, DType.I32)
        return y, inner.dynamic_update_slice(stack, inner.reshape(y, (1, 4)), (row, zero))

    _, stack = b.loop(3, [x, b.full((rows, 4), 0.0)], body)
    ranks = check(b.finish(stack), [normal(4)])
    filled = "step.fill" in [name for _, name in names(ranks)]
    assert filled == (way not in ("upwards", "downwards"))


def test_a_stack_that_a_loop_and_the_code_behind_it_fill_lies_where_it_ends() -> None:
    """The loop writes all rows but the last in the memory of the output: there is no other one."""
    b = Builder()
    x = b.input((400,))

    def written(inner: Builder, row: Value, y: Value, stack: Value) -> Value:
        zero = inner.constant(0, DType.I32)
        return inner.dynamic_update_slice(stack, inner.reshape(y, (1, 400)), (row, zero))

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        y, stack = carries
        y = inner.op("tanh", inner.add(y, y))
        return y, written(inner, i, y, stack)

    y, stack = b.loop(7, [x, b.full((8, 400), 0.0)], body)
    last = written(b, b.constant(7, DType.I32), b.op("tanh", y), stack)
    ranks = check(b.finish(last), [normal(400)])
    (one,) = ranks.outlined.programs
    assert [buffer.name for buffer in one.buffers if buffer.shape == (8, 400)] == ["o0"]
