"""What waits while a loop inside a loop runs: stacks are written before it, light values are made
again behind it, and every value is what the graph says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.traits import UPDATES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.outline.live_ranges import shrink_live_ranges
from tests.compiler.outline.test_outline import check, normal

TRIP, ROWS = 3, 16
SQUARE = (ROWS, ROWS)
WIDE, FIGURES = 4 * ROWS * ROWS, 4 * ROWS
"""Bytes of a matrix, and of a figure of each of its rows."""


def tanh(b: Builder, _: Value, values: tuple[Value, ...]) -> tuple[Value, ...]:
    return (b.op("tanh", values[0]),)


class Body:
    """The body of the outer loop: its counter, what it carries, rows to read, a stack to fill."""

    def __init__(self, b: Builder, counter: Value, value: Value, rows: Value, stack: Value) -> None:
        self.b, self.counter, self.value, self.rows, self.stack = b, counter, value, rows, stack

    def row(self, stack: Value) -> Value:
        zero = self.b.constant(0, DType.I32)
        found = self.b.dynamic_slice(stack, (self.counter, zero, zero), (1, *SQUARE))
        return self.b.reshape(found, SQUARE)

    def loop(self, value: Value) -> Value:
        """A loop inside, which reads only `value`."""
        return self.b.loop(2, [value], tanh)[0]

    def scaled(self, value: Value) -> tuple[Value, Value]:
        """Rows over the root of their sum of squares, and that."""
        squares = self.b.reduce(self.b.multiply(value, value), "add", (1,))
        figure = self.b.op("rsqrt", squares)
        return self.b.multiply(value, self.b.broadcast(figure, SQUARE, (0,))), figure


Made = Callable[[Body], tuple[Value, Value]]
"""The next carry, and what is written to the stack."""


def nest(made: Made) -> Graph:
    b = Builder()
    given = b.input(SQUARE), b.input((TRIP, *SQUARE)), b.input((TRIP, *SQUARE))

    def outer(level: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        value, rows, stack = carries
        value, row = made(Body(level, i, value, rows, stack))
        zero, row = level.constant(0, DType.I32), level.reshape(row, (1, *SQUARE))
        return value, rows, level.dynamic_update_slice(stack, row, (i, zero, zero))

    value, _, stack = b.loop(TRIP, given, outer)
    return b.finish(value, stack)


def body_of(graph: Graph) -> tuple[tuple[Op, ...], int]:
    """Ops of the outer loop, and where the inner one stands."""
    (loop,) = [op for op in graph.ops if op.regions]
    ops = loop.regions[0].ops
    (place,) = [i for i, op in enumerate(ops) if op.regions]
    return ops, place


def waiting(graph: Graph) -> int:
    """Bytes that are made before the inner loop and read behind it."""
    ops, place = body_of(graph)
    made = {v for op in ops[:place] if op.name not in UPDATES for v in op.results}
    return sum(v.type.num_bytes for v in made & {v for op in ops[place + 1 :] for v in op.operands})


def is_written_first(graph: Graph) -> bool:
    ops, place = body_of(graph)
    (at,) = [i for i, op in enumerate(ops) if op.name in UPDATES]
    return at < place


def product_first(body: Body) -> tuple[Value, Value]:
    product = body.b.dot(body.value, body.row(body.rows))
    return body.loop(body.value), product


def product_read_behind(body: Body) -> tuple[Value, Value]:
    product = body.b.dot(body.value, body.row(body.rows))
    return body.b.dot(body.loop(body.value), product), body.b.op("negate", product)


def stack_read_behind(body: Body) -> tuple[Value, Value]:
    product = body.b.dot(body.value, body.row(body.rows))
    return body.b.add(body.loop(body.value), body.row(body.stack)), product


def made_of_the_loop(body: Body) -> tuple[Value, Value]:
    found = body.loop(body.b.dot(body.value, body.row(body.rows)))
    return found, body.b.op("negate", found)


def row_read_behind(body: Body) -> tuple[Value, Value]:
    wide = body.b.op("negate", body.row(body.rows))
    found = body.loop(body.b.dot(body.value, wide))
    return found, body.b.dot(found, wide)


def scaled_read_behind(body: Body) -> tuple[Value, Value]:
    wide, _ = body.scaled(body.row(body.rows))
    found = body.loop(body.b.dot(body.value, wide))
    return found, body.b.dot(found, wide)


def figure_read_behind(body: Body) -> tuple[Value, Value]:
    _, figure = body.scaled(body.row(body.rows))
    found = body.loop(body.value)
    return found, body.b.multiply(found, body.b.broadcast(figure, SQUARE, (0,)))


def chain_read_behind(body: Body) -> tuple[Value, Value]:
    """Three that follow from the one that the loop reads anyway."""
    product = body.b.dot(body.value, body.row(body.rows))
    some = [body.b.op(name, product) for name in ("negate", "abs", "floor")]
    total = body.loop(product)
    for one in some:
        total = body.b.add(total, one)
    return total, product


@pytest.mark.parametrize(
    ("made", "is_early", "before", "after"),
    [
        (product_first, True, WIDE, 0),
        (product_read_behind, True, WIDE, WIDE),
        (stack_read_behind, False, WIDE, WIDE),
        (made_of_the_loop, False, 0, 0),
        (row_read_behind, False, WIDE, 0),
        (scaled_read_behind, False, WIDE, FIGURES),
        (figure_read_behind, False, FIGURES, FIGURES),
        (chain_read_behind, True, 4 * WIDE, WIDE),
    ],
)
def test_what_waits_for_a_loop_inside(made: Made, is_early: bool, before: int, after: int) -> None:
    graph = nest(made)
    assert waiting(graph) == before
    narrow = shrink_live_ranges(graph)
    assert is_written_first(narrow) is is_early
    assert waiting(narrow) == after


@pytest.mark.parametrize(
    "made",
    [product_first, stack_read_behind, row_read_behind, scaled_read_behind, chain_read_behind],
)
def test_values_are_those_of_the_graph(made: Made) -> None:
    arrays = [normal(*SQUARE), normal(TRIP, *SQUARE), normal(TRIP, *SQUARE)]
    check(nest(made), arrays, {0: 0, 1: 2}, tolerance=1e-5)


def test_a_graph_without_loops_inside_loops_is_left_alone() -> None:
    b = Builder()
    x = b.input(SQUARE)
    graph = b.finish(*b.loop(3, [x], tanh))
    assert shrink_live_ranges(graph) is graph
