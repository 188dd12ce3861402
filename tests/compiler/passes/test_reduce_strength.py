"""A value added twice is added once and doubled; nothing overflows on the way that did not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.pipeline import LOCAL_PASSES
from shardwright.compiler.passes.reduce_strength import reduce_strength
from shardwright.compiler.rewriting.driver import run
from tests.support.compiled import run_levels


def names(graph: Graph) -> list[str]:
    return [op.name for op in dce(graph).ops if op.name not in ("constant", "broadcast_in_dim")]


def sums(b: Builder, dtype: DType, form: str) -> Graph:
    a, x = b.input((3, 4), dtype), b.input((3, 4), dtype)
    y = b.op("multiply", x, x)
    match form:
        case "y + y":
            return b.finish(b.add(y, y))
        case "(a + y) + y":
            return b.finish(b.add(b.add(a, y), y))
        case "y + (y + a)":
            return b.finish(b.add(y, b.add(y, a)))
    return b.finish(b.add(b.add(a, y), x))


@pytest.mark.parametrize("form", ["y + y", "(a + y) + y", "y + (y + a)"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_two_equal_terms_are_one(form: str, dtype: DType) -> None:
    graph = sums(Builder(), dtype, form)
    made = reduce_strength(graph)
    assert names(made).count("add") == names(graph).count("add") - 1
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal((3, 4)).astype(dtype.numpy) for _ in range(2)]
    (want,), (have,) = evaluate(graph, inputs), evaluate(made, inputs)
    bound = 1e-6 if dtype is DType.F32 else 1e-2
    np.testing.assert_allclose(have.astype(np.float64), want.astype(np.float64), bound, bound)


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_sums_overflow_where_they_did(dtype: DType) -> None:
    """All pairs of extremes, not numbers and zeros among them: in the graph, and on the machine,
    which takes numbers below the smallest normal one as they are.
    """
    most, least = (float(x) for x in (ml_dtypes.finfo(dtype.numpy).max, 2.0**-126))
    sizes = [0.0, least / 8, least, 1.0, most / 3, most / 2, most * 0.5078125, most, np.inf]
    ends = np.array([*sizes, *(-x for x in sizes), np.nan])
    a, y = (part.astype(dtype.numpy) for part in np.meshgrid(ends, ends))
    b = Builder()
    left, right = b.input(a.shape, dtype), b.input(a.shape, dtype)
    graph = b.finish(b.add(b.add(left, right), right), b.add(right, right))
    made = reduce_strength(graph)
    assert len(dce(made).ops) > len(graph.ops)
    with np.errstate(all="ignore"):
        wanted = [v.astype(np.float64) for v in evaluate(graph, [a, y])]
        found = [evaluate(made, [a, y]), *run_levels(graph, [a, y])]
    bound = 1e-6 if dtype is DType.F32 else 1e-2
    for outputs in found:
        for have, want in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(have.astype(np.float64), want, bound, 2.0**-133)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("(a + y) + x", DType.F32), ("(a + y) + y", DType.F16), ("y + y", DType.I32)],
)
def test_other_sums_stay(form: str, dtype: DType) -> None:
    graph = sums(Builder(), dtype, form)
    assert reduce_strength(graph) is graph


def test_both_orders_of_a_product_count_as_one() -> None:
    """The gradient of x * x, as JAX writes it."""
    b = Builder()
    a, x, y = (b.input((8,)) for _ in range(3))
    total = b.add(b.add(a, b.op("multiply", x, y)), b.op("multiply", y, x))
    found = names(run(b.finish(total), LOCAL_PASSES))
    assert found == ["multiply", "multiply", "add", "multiply"]
