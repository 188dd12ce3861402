"""Iotas of equal length tie no indices: every reader has its own."""

from __future__ import annotations

import numpy as np

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.sharding.indices.indices import IndexClasses
from shardwright.sharding.strategies.iotas import iota_de_cse


def shared() -> Graph:
    """Positions and seats counted by one `iota`, at top level and in a loop."""
    b = Builder()
    x, seats = b.input((16, 4)), b.input((8, 16))
    count = b.convert(b.iota((16,), 0), x.type.dtype)
    y = b.add(x, b.broadcast(count, (16, 4), (0,)))
    z = b.add(seats, b.broadcast(count, (8, 16), (1,)))

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        x, seats, count = carries
        more = inner.add(x, inner.broadcast(count, (16, 4), (0,)))
        return more, inner.add(seats, inner.broadcast(count, (8, 16), (1,))), count

    y, z, _ = b.loop(2, [y, z, count], body)
    return b.finish(y, z)


def tied(graph: Graph) -> bool:
    (x, seats), indices = graph.inputs, IndexClasses(graph)
    return indices.family((x, 0)) == indices.family((seats, 1))


def at_top_level() -> Graph:
    b = Builder()
    x, seats = b.input((16, 4)), b.input((8, 16))
    count = b.convert(b.iota((16,), 0), x.type.dtype)
    y = b.add(x, b.broadcast(count, (16, 4), (0,)))
    return b.finish(y, b.add(seats, b.broadcast(count, (8, 16), (1,))))


def test_every_reader_of_an_iota_has_its_own() -> None:
    graph = at_top_level()
    assert tied(graph) and not tied(iota_de_cse(graph))
    assert sum(op.name == "iota" for op in iota_de_cse(graph).ops) == 2


def test_values_stay() -> None:
    graph = shared()
    given = [np.random.default_rng(0).normal(size=v.type.shape) for v in graph.inputs]
    given = [x.astype(np.float32) for x in given]
    for a, b in zip(evaluate(iota_de_cse(graph), given), evaluate(graph, given), strict=True):
        np.testing.assert_array_equal(a, b)
