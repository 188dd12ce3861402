"""A value added twice becomes a product with two, where no sum can overflow on the way."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.dtypes import DType
from compiler.ir.build import Builder
from compiler.ir.reference import evaluate
from compiler.ir.types import Graph
from compiler.passes.dce import dce
from compiler.passes.doubled import doubled
from compiler.passes.pipeline import LOCAL_PASSES, run


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
    made = doubled(graph)
    assert names(made).count("add") == names(graph).count("add") - 1
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal((3, 4)).astype(dtype.numpy) for _ in range(2)]
    (want,), (have,) = evaluate(graph, inputs), evaluate(made, inputs)
    bound = 1e-6 if dtype is DType.F32 else 1e-2
    np.testing.assert_allclose(have.astype(np.float64), want.astype(np.float64), bound, bound)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("(a + y) + x", DType.F32), ("(a + y) + y", DType.F16), ("y + y", DType.I32)],
)
def test_other_sums_stay(form: str, dtype: DType) -> None:
    graph = sums(Builder(), dtype, form)
    assert doubled(graph) is graph


def test_both_orders_of_a_product_count_as_one() -> None:
    """The gradient of x * x, as JAX writes it."""
    b = Builder()
    a, x, y = (b.input((8,)) for _ in range(3))
    total = b.add(b.add(a, b.op("multiply", x, y)), b.op("multiply", y, x))
    assert names(run(b.finish(total), LOCAL_PASSES)) == ["multiply", "multiply", "add"]
