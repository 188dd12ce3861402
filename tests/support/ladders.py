"""Ladders: every rung reads the one below by two ways, so a graph of 200 rungs has 2**200 paths.

What walks paths instead of nodes never ends on one; what remembers what it has seen takes twice as
many calls for twice as many rungs. `calls` counts them, so that no test here asks a clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import GatherAttrs
from shardwright.compiler.ir.types import Graph, Value
from shardwright.sharding.partition.partitioned import Slot
from tests.support.building import Builder

ROWS, WIDTH = 8, 8
Rung = Callable[[Builder, Value], Value]


PARAMETER, BATCH, LOSS = Slot("w", "parameter"), Slot("x", "batch", 0), Slot("loss", "metric")


def unary(b: Builder, x: Value) -> Value:
    """Two functions of one value."""
    return b.add(b.op("tanh", x), b.op("negate", x))


def product(b: Builder, x: Value) -> Value:
    """The value with a function of itself."""
    return b.multiply(x, b.op("logistic", x))


def exponent(b: Builder, x: Value) -> Value:
    """What a softmax does, without its sum."""
    return b.op("divide", b.op("exponential", x), b.add(x, b.full(x.type.shape, 2.0)))


def extreme(b: Builder, x: Value) -> Value:
    """The larger of two, the smaller of two."""
    return b.op("maximum", x, b.op("minimum", b.op("negate", x), x))


def chosen(b: Builder, x: Value) -> Value:
    """A selection by a comparison of the same values."""
    other = b.op("negate", x)
    return b.op("select", b.compare(x, other, "GT"), other, x)


def clamped(b: Builder, x: Value) -> Value:
    """Within bounds that are values."""
    low = b.op("negate", x)
    return b.op("clamp", low, x, b.op("tanh", x))


def converted(b: Builder, x: Value) -> Value:
    """A value and its rounding."""
    return b.add(x, b.convert(b.convert(x, DType.BF16), DType.F32))


def folded(b: Builder, x: Value) -> Value:
    """A value without the sum of its row."""
    total = b.reduce(x, "add", (1,))
    return b.op("subtract", x, b.broadcast(total, x.type.shape, (0,)))


def folded_extreme(b: Builder, x: Value) -> Value:
    """The exponential below the largest of a row."""
    top = b.reduce(x, "max", (1,))
    return b.op("exponential", b.op("subtract", x, b.broadcast(top, x.type.shape, (0,))))


def transposed(b: Builder, x: Value) -> Value:
    """A square and its transpose."""
    return b.op("subtract", x, b.transpose(x, (1, 0)))


def reshaped(b: Builder, x: Value) -> Value:
    """In another shape, in another order, and back."""
    rows, width = x.type.shape
    other = b.reshape(b.transpose(b.reshape(x, (rows, 2, width // 2)), (0, 2, 1)), (rows, width))
    return b.op("subtract", x, other)


def joined(b: Builder, x: Value) -> Value:
    """Halves that change places."""
    rows, width = x.type.shape
    left = b.slice(x, (0, 0), (rows, width // 2))
    right = b.slice(x, (0, width // 2), (rows, width))
    return b.concatenate((right, left), 1)


def padded(b: Builder, x: Value) -> Value:
    """A slice in a frame of zeros, beside the value."""
    rows, width = x.type.shape
    inner = b.slice(x, (0, 1), (rows, width))
    return b.add(x, b.pad(inner, b.constant(0.0), (0, 0), (0, 1)))


def reversed_(b: Builder, x: Value) -> Value:
    """A value and its mirror image."""
    return b.op("subtract", x, b.reverse(x, (1,)))


def contracted(b: Builder, x: Value) -> Value:
    """A square by itself."""
    return b.dot(x, x)


def gathered(b: Builder, x: Value) -> Value:
    """Rows that the value itself names."""
    rows, width = x.type.shape
    index = b.convert(b.reduce(x, "max", (1,)), DType.I32)
    index = b.op("clamp", b.full((rows,), 0, DType.I32), index, b.full((rows,), 7, DType.I32))
    attrs = GatherAttrs(
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=1,
        slice_sizes=(1, width),
    )
    return b.add(x, b.op("gather", x, index, attrs=attrs))


def kept_apart(b: Builder, x: Value) -> Value:
    """Two sides of a barrier."""
    left, right = b.barrier(x, b.op("tanh", x))
    return b.add(left, right)


def looped(b: Builder, x: Value) -> Value:
    """A rung inside a loop, and its start."""

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        return (unary(inner, carries[0]),)

    return b.add(x, b.loop(3, (x,), body)[0])


RUNGS: dict[str, Rung] = {
    "unary": unary,
    "product": product,
    "exponent": exponent,
    "extreme": extreme,
    "chosen": chosen,
    "clamped": clamped,
    "converted": converted,
    "folded": folded,
    "folded_extreme": folded_extreme,
    "transposed": transposed,
    "reshaped": reshaped,
    "joined": joined,
    "padded": padded,
    "reversed": reversed_,
    "contracted": contracted,
    "gathered": gathered,
    "kept_apart": kept_apart,
    "looped": looped,
}


def positions(b: Builder, x: Value, rungs: int) -> Value:
    """Rows of `x` at places that are counted."""
    rows, width = x.type.shape
    place = b.iota((rows, 1), 0)
    for _ in range(rungs):
        place = b.op("subtract", b.add(place, place), place)
    attrs = GatherAttrs(
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=1,
        slice_sizes=(1, width),
    )
    return b.op("gather", x, place, attrs=attrs)


def masks(b: Builder, x: Value, rungs: int) -> Value:
    """`x` below a diagonal that is counted."""
    rows, columns = (b.iota(x.type.shape, dim) for dim in (0, 1))
    for _ in range(rungs):
        rows = b.op("subtract", b.add(rows, columns), columns)
        columns = b.op("subtract", b.add(columns, rows), rows)
    return b.op("select", b.compare(rows, columns, "GE"), x, b.full(x.type.shape, 0.0))


def truths(b: Builder, x: Value, rungs: int) -> Value:
    """`x` where a predicate of positions holds."""
    rows, columns = (b.iota(x.type.shape, dim) for dim in (0, 1))
    holds = b.compare(rows, columns, "GE")
    for _ in range(rungs):
        holds = b.op("xor", b.op("or", holds, b.compare(columns, rows, "LT")), holds)
    return b.op("select", holds, x, b.full(x.type.shape, 0.0))


def numbers(b: Builder, x: Value, rungs: int) -> Value:
    """A row of `x` whose number is computed."""
    place = b.constant(1, DType.I32)
    for _ in range(rungs):
        place = b.op("subtract", b.add(place, place), place)
    row = b.dynamic_slice(x, [place, b.constant(0, DType.I32)], (1, x.type.shape[1]))
    return (
        b.broadcast(row, x.type.shape, (0, 1))
        if x.type.shape[0] == 1
        else b.add(x, b.broadcast(b.reshape(row, (x.type.shape[1],)), x.type.shape, (1,)))
    )


def turns(b: Builder, x: Value, rungs: int) -> Value:
    """A row for every turn of a loop, whose number is computed from the counter."""

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        table, total = carries
        place = i
        for _ in range(rungs):
            place = inner.op("subtract", inner.add(place, place), place)
        row = inner.dynamic_slice(table, [place, inner.constant(0, DType.I32)], (1, WIDTH))
        return table, inner.add(total, inner.broadcast(row, (ROWS, WIDTH), (0, 1)))

    return b.loop(3, (x, x), body)[1]


COUNTED: dict[str, Callable[[Builder, Value, int], Value]] = {
    "positions": positions,
    "masks": masks,
    "truths": truths,
    "numbers": numbers,
    "turns": turns,
}


def ladder(kind: str, rungs: int) -> Graph:
    """A step that adds to a parameter what a ladder makes of a batch: (parameter, batch) ->
    (parameter, loss).
    """
    b = Builder()
    weight, x = b.input((WIDTH,)), b.input((ROWS, WIDTH))
    x = b.multiply(x, b.broadcast(weight, (ROWS, WIDTH), (1,)))
    if kind in COUNTED:
        x = COUNTED[kind](b, x, rungs)
    for _ in range(rungs if kind in RUNGS else 0):
        x = RUNGS[kind](b, x)
    moved = b.add(weight, b.reduce(x, "add", (0,)))
    return b.finish(moved, b.reduce(x, "add", (0, 1)))


RATIO = 2.6
"""Twice the rungs take twice the calls, and something for sorting and for sets that grow."""


def check_grows(
    make: Callable[[int], Callable[[], object]], rungs: int = 100, most: int = 400_000
) -> None:
    """Hold what `make` gives for a ladder, and for one of twice as many rungs, to twice the calls;
    above `most` it is stopped.
    """
    make(2)()  # imports and tables
    once, twice = (calls(make(n), most) for n in (rungs, 2 * rungs))
    assert twice <= RATIO * once, (once, twice)


def calls(what: Callable[[], object], most: int) -> int:
    """Calls of functions that `what` makes; it is stopped above `most`."""
    found = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")
        if found > most:
            raise TooManyCallsError(frame.f_code.co_qualname)

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return found


class TooManyCallsError(Exception):
    """More calls than the size of the graph allows."""
