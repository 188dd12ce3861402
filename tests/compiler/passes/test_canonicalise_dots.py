"""Contractions take the order their transpose is read in, and keep their values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.passes.canonicalise_dots import canonicalise_dots
from shardwright.compiler.passes.dce import dce


def arrays(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.type.shape).astype(v.type.dtype.numpy) for v in graph.inputs]


def clean(graph: Graph) -> Graph:
    return dce(canonicalise_dots(graph))


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


def weight_gradient(narrow: bool = False) -> Graph:
    """(x^T dy) as tracing writes it: dy^T x, then a transpose."""
    b = Builder()
    x, dy = b.input((6, 3)), b.input((6, 4))
    product = b.dot(dy, x, ((0,), (0,)))
    if narrow:
        product = b.convert(product, DType.BF16)
    return b.finish(b.transpose(product, (1, 0)))


def test_a_weight_gradient_needs_no_transpose() -> None:
    graph = weight_gradient()
    turned = clean(graph)
    assert names(turned) == ["dot_general"]
    assert turned.outputs == graph.outputs
    np.testing.assert_allclose(
        evaluate(turned, arrays(graph))[0], evaluate(graph, arrays(graph))[0], rtol=1e-6
    )


def test_a_conversion_may_stand_between() -> None:
    assert names(clean(weight_gradient(narrow=True))) == ["dot_general", "convert"]


def test_attention_output_keeps_its_innermost_dim() -> None:
    b = Builder()
    v, p = b.input((2, 3, 5, 8)), b.input((2, 3, 7, 5))  # b h s e, b h t s
    product = b.dot(v, p, ((2,), (3,)), ((0, 1), (0, 1)))  # b h e t
    graph = b.finish(b.transpose(product, (0, 3, 1, 2)))
    turned = clean(graph)
    dot, moved = turned.ops
    assert dot.result.type.shape == (2, 3, 7, 8) and moved.attrs.permutation == (0, 2, 1, 3)
    np.testing.assert_allclose(
        evaluate(turned, arrays(graph))[0], evaluate(graph, arrays(graph))[0], rtol=1e-6
    )


def test_what_others_read_or_what_would_not_help_is_left_alone() -> None:
    b = Builder()
    x, y = b.input((6, 3)), b.input((6, 4))
    product = b.dot(y, x, ((0,), (0,)))
    shared = b.finish(b.transpose(product, (1, 0)), product)
    assert clean(shared) is not None and names(clean(shared)) == ["dot_general", "transpose"]
    b = Builder()
    v, p = b.input((2, 6, 3)), b.input((2, 6, 4))
    batched = b.dot(v, p, ((1,), (1,)), ((0,), (0,)))
    kept = b.finish(b.transpose(batched, (1, 0, 2)))
    assert names(clean(kept)) == ["dot_general", "transpose"]
    assert clean(kept).ops[0] is kept.ops[0]


def test_loops_are_entered() -> None:
    b = Builder()
    x, dy = b.input((6, 4)), b.input((6, 4))

    def body(c: Builder, _: object, carries: tuple) -> list:
        rows, grads = carries
        return [rows, c.add(grads, c.transpose(c.dot(rows, rows, ((0,), (0,))), (1, 0)))]

    graph = b.finish(b.loop(3, [x, b.dot(x, dy, ((0,), (0,)))], body)[1])
    (loop,) = [op for op in clean(graph).ops if op.name == "loop"]
    assert "transpose" not in names(loop.regions[0])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2), st.integers(1, 2), st.integers(1, 2), st.data(), st.integers(0, 2**31))
def test_any_transpose_of_any_contraction_keeps_its_value(
    batch: int, left: int, right: int, data: st.DataObject, seed: int
) -> None:
    sizes = [2, 3, 4, 5, 2, 3]
    common = sizes[:batch]
    b = Builder()
    lhs = b.input((*common, *sizes[2 : 2 + left], 5))
    rhs = b.input((*common, 5, *sizes[3 : 3 + right]))
    dims = tuple(range(batch))
    product = b.dot(lhs, rhs, ((batch + left,), (batch,)), (dims, dims))
    order = data.draw(st.permutations(range(product.type.rank)))
    graph = b.finish(b.transpose(product, tuple(order)))
    turned = clean(graph)
    given_, wanted = (evaluate(g, arrays(graph, seed))[0] for g in (turned, graph))
    np.testing.assert_allclose(given_, wanted, rtol=1e-5, atol=1e-5)
    assert innermost_runs(turned) >= innermost_runs(graph)


def innermost_runs(graph: Graph) -> bool:
    """True when the innermost dim of the result is the innermost dim of the contraction."""
    last: Op = graph.ops[-1]
    return last.name != "transpose" or last.attrs.permutation[-1] == last.result.type.rank - 1


def test_the_swap_happens_before_partitioning() -> None:
    from shardwright.compiler.passes.pipeline import STEP_PASSES
    from shardwright.compiler.rewriting.driver import run

    assert names(run(weight_gradient(), STEP_PASSES)) == ["dot_general"]


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_the_element_type_of_the_sum_stays(dtype: DType) -> None:
    b = Builder()
    x, y = b.input((6, 3), dtype), b.input((6, 4), dtype)
    graph = b.finish(b.transpose(b.dot(y, x, ((0,), (0,))), (1, 0)))
    assert clean(graph).outputs[0].type == graph.outputs[0].type
    assert clean(graph).ops[0].attrs.dtype is dtype
