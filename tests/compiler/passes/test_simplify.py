"""Rewrites of `simplify` keep values, and happen only where they are exact."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import ConcatenateAttrs, PadAttrs, SliceAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.simplify import simplify

RNG = np.random.default_rng(3)


def names(graph: Graph) -> list[str]:
    return [op.name for op in dce(graph).ops if op.name != "constant"]


def check(graph: Graph) -> Graph:
    """The simplified graph, with equal values on random inputs."""
    inputs = [RNG.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs]
    made = simplify(graph)
    for want, have in zip(evaluate(graph, inputs), evaluate(made, inputs), strict=True):
        np.testing.assert_array_equal(want, have)
    return made


@pytest.mark.parametrize(
    ("dims", "wanted"), [((1,), ["reshape"]), ((1, 2), ["reduce", "reshape"]), ((2,), ["reduce"])]
)
@pytest.mark.parametrize("kind", ["add", "max", "multiply"])
def test_dims_of_size_one_are_not_reduced(kind: str, dims: tuple[int, ...], wanted) -> None:
    b = Builder()
    graph = check(b.finish(b.reduce(b.input((3, 1, 5)), kind, dims)))
    assert names(graph) == wanted


def test_sums_over_one_sample_can_be_kept() -> None:
    """They say where samples are added up; other kinds say nothing."""
    for kind, wanted in (("add", ["reduce"]), ("max", ["reshape"])):
        b = Builder()
        graph = b.finish(b.reduce(b.input((1, 4)), kind, (0,)))
        assert names(simplify(graph, keep_sums=True)) == wanted


def padded(b: Builder, width: int, low: int, high: int, value: float = 0.0):
    zero = b.constant(value, DType.F32)
    return b.op("pad", b.input((4, width)), zero, attrs=PadAttrs((0, low), (0, high), (0, 0)))


@pytest.mark.parametrize("swapped", [False, True])
def test_pieces_that_meet_become_a_concatenation(swapped: bool) -> None:
    b = Builder()
    pieces = [padded(b, 3, 0, 5), padded(b, 5, 3, 0)]
    graph = check(b.finish(b.add(*pieces[:: -1 if swapped else 1])))
    assert names(graph) == ["concatenate"]


def test_three_pieces_become_concatenations() -> None:
    b = Builder()
    first = b.add(padded(b, 3, 0, 6), padded(b, 2, 3, 4))
    assert "add" not in names(check(b.finish(b.add(first, padded(b, 4, 5, 0)))))


@pytest.mark.parametrize(
    ("first", "second"),
    [((3, 0, 5, 0.0), (5, 2, 1, 0.0)), ((3, 0, 5, 1.0), (5, 3, 0, 0.0)), ((2, 0, 6), (5, 3, 0))],
    ids=["overlap", "not zero", "gap"],
)
def test_other_sums_of_pads_stay(first, second) -> None:
    b = Builder()
    graph = b.finish(b.add(padded(b, *first), padded(b, *second)))
    assert names(check(graph)) == ["pad", "pad", "add"]


def cut(b: Builder, value, start: int, limit: int):
    return b.op("slice", value, attrs=SliceAttrs((0, start), (4, limit), (1, 1)))


@pytest.mark.parametrize(
    ("ranges", "wanted"),
    [
        (((0, 3), (3, 8)), ["reshape"]),
        (((1, 3), (3, 5), (5, 7)), ["slice"]),
        (((0, 3), (4, 8)), ["slice", "slice", "concatenate"]),
        (((3, 8), (0, 3)), ["slice", "slice", "concatenate"]),
    ],
)
def test_neighbouring_slices_are_one(ranges, wanted: list[str]) -> None:
    b = Builder()
    source = b.input((4, 8))
    pieces = [cut(b, source, *r) for r in ranges]
    graph = check(b.finish(b.op("concatenate", *pieces, attrs=ConcatenateAttrs(1))))
    assert names(graph) == wanted


def test_slices_of_two_values_or_other_rows_stay() -> None:
    b = Builder()
    first, second = b.input((4, 8)), b.input((4, 8))
    rows = b.op("slice", first, attrs=SliceAttrs((1, 3), (4, 8), (1, 1)))
    upper = b.op("slice", first, attrs=SliceAttrs((0, 0), (3, 3), (1, 1)))
    apart = (cut(b, first, 0, 3), cut(b, second, 3, 8))
    for pair in (apart, (upper, rows)):
        graph = check(b.finish(b.op("concatenate", *pair, attrs=ConcatenateAttrs(1))))
        assert names(graph) == ["slice", "slice", "concatenate"]
