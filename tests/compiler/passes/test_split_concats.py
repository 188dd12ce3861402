"""Concatenations vanish where pieces will do, stay where they will not, and values are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.split_concats import MAX_PIECES, split_concats

RNG = np.random.default_rng(5)
JOINS = {"concatenate", "pad"}


def joins(graph: Graph) -> int:
    return sum(op.name in JOINS for op in dce(graph).walk())


def check(graph: Graph) -> Graph:
    """The graph in pieces, with equal values on random inputs."""
    inputs = [RNG.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs]
    made = split_concats(graph)
    for want, have in zip(evaluate(graph, inputs), evaluate(made, inputs), strict=True):
        np.testing.assert_allclose(want, have, rtol=1e-6, atol=1e-6)
    return made


def joined(b: Builder, widths: Sequence[int]) -> Value:
    return b.concatenate([b.input((3, n)) for n in widths], 1)


def test_softmax_with_a_sink_and_its_padded_gradient() -> None:
    b = Builder()
    c = b.concatenate([b.full((3, 1), 0.5), b.input((3, 7))], 1)
    top = b.reduce(c, "max", (1,))
    e = b.op("exponential", b.op("subtract", c, b.broadcast(top, (3, 8), (0,))))
    p = b.op("divide", e, b.broadcast(b.reduce(e, "add", (1,)), (3, 8), (0,)))
    out = b.slice(p, (0, 1), (3, 8))
    back = b.multiply(b.pad(out, b.constant(0.0), (0, 1), (0, 0)), p)
    graph = b.finish(out, b.slice(back, (0, 1), (3, 8)), b.reduce(back, "add", (1,)))
    assert joins(graph) == 2
    assert joins(check(graph)) == 0


@pytest.mark.parametrize("kind", ["add", "max", "min", "multiply"])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_folds_of_pieces(kind: str, dims: tuple[int, ...]) -> None:
    b = Builder()
    c = b.op("tanh", joined(b, (2, 1, 4)))
    whole = b.reduce(b.multiply(c, b.convert(b.iota((3, 7), 1), DType.F32)), kind, dims)
    graph = b.finish(whole if 1 in dims else b.slice(whole, (3,), (6,)))
    assert joins(check(graph)) == 0


@pytest.mark.parametrize(("low", "high"), [(2, 0), (0, 3), (2, 3)])
def test_pads_and_transposes(low: int, high: int) -> None:
    b = Builder()
    padded = b.pad(b.input((3, 4)), b.constant(-2.0), (0, low), (0, high))
    transposed = b.transpose(padded, (1, 0))
    graph = b.finish(
        b.reduce(transposed, "max", (0,)), b.slice(transposed, (low, 0), (low + 3, 3), (2, 1))
    )
    assert joins(check(graph)) == 0


def stored(b: Builder) -> Value:
    return joined(b, (2, 3))


def contracted(b: Builder) -> Value:
    return b.dot(joined(b, (2, 3)), b.input((5, 4)), contract=((1,), (0,)))


def cut_elsewhere(b: Builder) -> Value:
    return b.reduce(b.add(joined(b, (2, 3)), joined(b, (3, 2))), "add", (1,))


def sliced_across(b: Builder) -> Value:
    return b.slice(joined(b, (2, 3)), (0, 1), (3, 4))


def with_a_whole_value(b: Builder) -> Value:
    return b.reduce(b.add(joined(b, (2, 3)), b.input((3, 5))), "add", (1,))


def read_twice(b: Builder) -> Value:
    c = joined(b, (2, 3))
    return b.add(b.broadcast(b.reduce(c, "add", (1,)), (3, 5), (0,)), c)


def of_many_pieces(b: Builder) -> Value:
    return b.reduce(joined(b, (1,) * (MAX_PIECES + 1)), "add", (1,))


@pytest.mark.parametrize(
    "make",
    [
        stored,
        contracted,
        cut_elsewhere,
        sliced_across,
        with_a_whole_value,
        read_twice,
        of_many_pieces,
    ],
)
def test_what_needs_the_whole_keeps_it(make: Callable[[Builder], Value]) -> None:
    b = Builder()
    graph = b.finish(make(b))
    assert joins(check(graph)) == joins(graph) > 0


def test_a_family_is_kept_or_split_as_one() -> None:
    """Values that meet share their fate; others of the level do not."""
    b = Builder()
    kept, gone = joined(b, (2, 3)), joined(b, (2, 3))
    graph = b.finish(b.op("tanh", kept), b.reduce(gone, "add", (1,)))
    assert joins(check(graph)) == 1
