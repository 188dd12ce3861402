"""Sinking keeps values, removes the carry, and leaves what is dear to make again outside."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.dtypes import DType
from compiler.ir.build import Builder
from compiler.ir.reference import evaluate
from compiler.ir.types import Graph, Op, Value
from compiler.passes.pipeline import STEP_PASSES, run


def masked_loop(table: str) -> Graph:
    """Three steps of select(mask, x, fill) + table; mask, fill and table are made outside."""
    b = Builder("masked")
    x = b.input((5, 5))
    mask = b.compare(b.iota((5, 5), 0), b.iota((5, 5), 1), "GE")
    fill = b.broadcast(b.constant(-2.0), (5, 5))
    rows = b.broadcast(b.iota((5,), 0), (5, 5), (1,))
    made = b.op(table, b.convert(rows, DType.F32))

    def body(c: Builder, _: Value, carries: tuple[Value, ...]) -> list[Value]:
        y, m, f, t = carries
        return [c.add(c.op("select", m, y, f), t), m, f, t]

    return b.finish(b.loop(3, [x, mask, fill, made], body)[0])


def the_loop(graph: Graph) -> Op:
    (loop,) = [op for op in graph.ops if op.name == "loop"]
    return loop


@pytest.mark.parametrize(("table", "carries"), [("negate", 2), ("cosine", 3)])
def test_cheap_constants_are_made_inside_and_tables_stay_outside(table: str, carries: int) -> None:
    graph = masked_loop(table)
    sunk = run(graph, STEP_PASSES)
    assert len(the_loop(graph).operands) == 5
    assert len(the_loop(sunk).operands) == carries  # counter, x, and the table when it is dear
    x = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    np.testing.assert_array_equal(evaluate(graph, [x])[0], evaluate(sunk, [x])[0])
