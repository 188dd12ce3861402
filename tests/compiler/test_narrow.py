"""Values kept in a short type: which ones, and that no bit of a result changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.passes.narrow import narrow
from shardwright.sharding.indices.dims import reached
from tests.support.building import Builder

BF16, F32 = DType.BF16, DType.F32
SHAPE = (3, 4)
LAYERS = 5


def short(graph: Graph) -> Graph:
    """Everything that follows from the inputs may be short."""
    found = narrow(graph, BF16, reached(graph, graph.inputs))
    verify(found)
    return found


def same_bits(graph: Graph, found: Graph) -> bool:
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs]
    pairs = zip(evaluate(graph, arrays), evaluate(found, arrays), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def rounded(b: Builder, value: Value) -> Value:
    return b.convert(b.convert(value, BF16), F32)


def layers(*, first: bool, wide_reader: bool = False) -> Graph:
    """Layers that hand on what is rounded and store what they are given; a second loop reads the
    stack. `first` says whether the first one is given something rounded, too.
    """
    b = Builder()
    x = b.input(SHAPE)
    start = rounded(b, x) if first else x

    def forward(inner: Builder, i: Value, carries: Sequence[Value]) -> list[Value]:
        h, stack = carries
        zero = inner.constant(0, DType.I32)
        kept = inner.dynamic_update_slice(stack, inner.reshape(h, (1, *SHAPE)), (i, zero, zero))
        return [rounded(inner, inner.op("sine", h)), kept]

    def backward(inner: Builder, i: Value, carries: Sequence[Value]) -> list[Value]:
        g, stack = carries
        zero = inner.constant(0, DType.I32)
        row = inner.reshape(inner.dynamic_slice(stack, (i, zero, zero), (1, *SHAPE)), SHAPE)
        return [inner.add(inner.op("tanh", g), inner.multiply(row, g)), stack]

    h, stack = b.loop(LAYERS, [start, b.full((LAYERS, *SHAPE), 0.0)], forward)
    g, _ = b.loop(LAYERS, [h, stack], backward)
    return b.finish(g, b.op("cosine", stack) if wide_reader else h)


def carried(graph: Graph) -> list[list[str]]:
    """Types of the float carries of every loop."""
    loops = [op for op in graph.ops if op.name == "loop"]
    return [[v.type.dtype.value for v in op.results if v.type.dtype.is_float] for op in loops]


@pytest.mark.parametrize("wide_reader", [False, True])
def test_stacks_of_what_is_rounded_are_short(wide_reader: bool) -> None:
    """Whoever reads them; what is computed from them is not."""
    graph = layers(first=True, wide_reader=wide_reader)
    found = short(graph)
    assert carried(graph) == [["f32", "f32"], ["f32", "f32"]]
    assert carried(found) == [["bf16", "bf16"], ["f32", "bf16"]]
    assert same_bits(graph, found)


def test_one_value_that_is_not_rounded_keeps_its_stack_wide() -> None:
    graph = layers(first=False)
    found = short(graph)
    assert carried(found) == carried(graph)
    assert same_bits(graph, found)


def test_a_stack_whose_readers_round_is_short() -> None:
    """Whatever is written to it."""
    for rounds in (True, False):
        b = Builder()
        x = b.input(SHAPE)

        def store(inner: Builder, i: Value, carries: Sequence[Value]) -> list[Value]:
            h, stack = carries
            zero = inner.constant(0, DType.I32)
            row = inner.reshape(inner.op("sine", h), (1, *SHAPE))
            return [inner.op("cosine", h), inner.dynamic_update_slice(stack, row, (i, zero, zero))]

        _, stack = b.loop(LAYERS, [x, b.full((LAYERS, *SHAPE), 0.0)], store)
        transposed = b.transpose(stack, (1, 0, 2))
        square = b.convert(transposed, BF16)
        graph = b.finish(square, square if rounds else transposed)
        found = short(graph)
        assert carried(found)[0][-1] == ("bf16" if rounds else "f32")
        assert same_bits(graph, found)


def test_only_values_that_are_named_change() -> None:
    graph = layers(first=True)
    assert narrow(graph, BF16, ()) is graph


def test_a_barrier_passes_each_value_on_alone() -> None:
    b = Builder()
    x = b.input(SHAPE)
    held = b.barrier(rounded(b, x), b.op("sine", x))
    graph = b.finish(*(b.op("tanh", b.reshape(v, (12,))) for v in held))
    found = short(graph)
    (barrier,) = (op for op in found.ops if op.name == "optimization_barrier")
    assert [v.type.dtype for v in barrier.results] == [BF16, F32]
    assert same_bits(graph, found)


STEPS = {
    "round": lambda b, v: rounded(b, v),
    "sine": lambda b, v: b.op("sine", v),
    "transposed": lambda b, v: b.transpose(v, (1, 0)),
    "there and back": lambda b, v: b.reshape(b.reshape(v, (12,)), v.type.shape),
    "cut": lambda b, v: b.pad(
        b.slice(v, (1, 0), v.type.shape), b.constant(0.5, F32), (1, 0), (0, 0)
    ),
    "join": lambda b, v: b.slice(b.concatenate([v, rounded(b, v)], 0), (0, 0), v.type.shape),
    "square": lambda b, v: b.multiply(v, v),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), max_size=8),
    st.integers(0, 3),
    st.sampled_from(["rounded", "as it is", "also dropped"]),
)
def test_random_chains_keep_their_bits(names: list[str], inside: int, given_as: str) -> None:
    """Some of the chain in a loop; every second value is an output too. The chain starts at an
    input or at its rounding; the loop may carry the input, too, and read nothing of it.
    """
    b = Builder()
    x = b.input((4, 3))
    value = x if given_as == "as it is" else rounded(b, x)

    def body(inner: Builder, _: Value, carries: Sequence[Value]) -> list[Value]:
        now, *dropped = carries
        for name in names[:inside]:
            now = STEPS[name](inner, now)
        return [inner.reshape(now, (4, 3)), *(inner.full((4, 3), 1.5) for _ in dropped)]

    dropped = [x] if given_as == "also dropped" else []
    value, *last = b.loop(2, [value, *dropped], body)
    outputs = [value]
    for name in names[inside:]:
        outputs.append(STEPS[name](b, outputs[-1]))
    ends = [b.convert(v, BF16) for v in (x, outputs[-1], *last)]
    graph = b.finish(*outputs[::2], *ends)
    assert same_bits(graph, short(graph))


def test_inputs_keep_their_types() -> None:
    """One that is only rounded, and carried by a loop that does not read it."""
    b = Builder()
    x = b.input(SHAPE)
    a = b.op("sine", b.convert(x, BF16))
    (z,) = b.loop(3, [x], lambda inner, i, carries: [inner.full(SHAPE, 1.5)])
    graph = b.finish(a, b.convert(z, BF16))
    found = short(graph)
    assert found.inputs == graph.inputs
    assert same_bits(graph, found)


def test_conversions_stand_where_their_values_do() -> None:
    """What is added has the place of the value it converts; an input has none."""
    b = Builder(loc=Loc("net.py", 3))
    x = b.input(SHAPE)
    held = b.barrier(b.op("sine", x))[0]
    graph = b.finish(b.convert(held, BF16), b.convert(b.transpose(x, (1, 0)), BF16))
    converts = [op for op in short(graph).ops if op.name == "convert"]
    assert [(op.operands[0] in graph.inputs, op.loc.line) for op in converts] == [
        (False, 3),
        (True, 0),
    ]
    assert same_bits(graph, short(graph))


def test_conversions_do_not_pile_up() -> None:
    """A rounded value that is moved and rounded again is converted once."""
    b = Builder()
    x = b.input(SHAPE)
    graph = b.finish(b.convert(b.transpose(rounded(b, x), (1, 0)), BF16))
    assert names(short(graph).ops) == ["convert", "transpose"]


def names(ops: Sequence[Op]) -> list[str]:
    return [op.name for op in ops]
