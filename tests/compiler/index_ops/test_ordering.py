"""Sorts, selections of the first few, positions of extremes and branches, compiled, against JAX."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.lower.canonical import canonical
from tests.harnesses.agreement import assert_same_with_special_values
from tests.harnesses.case import OpCase, build_graph, case_inputs
from tests.harnesses.sort import CASES
from tests.support import xla
from tests.support.cells import long_in_matrix
from tests.support.compiled import check_against_jax, graph_of, levels_of, link, run_levels

ODD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1.0, -np.nan, 0.5], np.float32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def below(high: int, *shape: int, low: int = 0, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


IN_OP_TESTS = [case for case in CASES if "special" not in case.id and "ties" not in case.id]
"""Lowered by `tests/compiler/lower/test_lower_ops.py` too, against NumPy."""


def odd(*shape: int) -> np.ndarray:
    size = int(np.prod(shape))
    return np.random.default_rng(7).permutation(np.resize(ODD, size)).reshape(shape)


@pytest.mark.parametrize("case", long_in_matrix(CASES, IN_OP_TESTS), ids=lambda c: c.id)
def test_harness_rows_at_both_levels(case: OpCase) -> None:
    graph, inputs = build_graph(case), case_inputs(case)
    wanted, program = xla.run(to_stablehlo(graph), inputs), link(graph)
    for outputs in levels_of(program, inputs):
        for have, want in zip(outputs, wanted, strict=True):
            width = f"u{have.dtype.itemsize}"  # bits: the sign of a zero and of a NaN count
            np.testing.assert_array_equal(have.view(width), want.view(width))
    assert_same_with_special_values(case, program)


@pytest.mark.matrix
def test_sort_and_argsort_along_any_dim() -> None:
    for axis, x in enumerate((normal(4, 11, 3), odd(4, 11, 3), below(5, 4, 3, 11))):
        check_against_jax(lambda x, a=axis: jnp.sort(x, axis=a), x)
        check_against_jax(lambda x, a=axis: jnp.argsort(x, axis=a), x)


@pytest.mark.exhaustive
def test_sort_of_one_long_row_by_two_keys() -> None:
    check_against_jax(lambda x, i: lax.sort((i, x), num_keys=2), normal(300), below(9, 300))


@pytest.mark.matrix
def test_sort_of_a_row_longer_than_a_bank() -> None:
    check_against_jax(lambda x: jnp.argsort(x), normal(600))


@pytest.mark.parametrize("k", long_in_matrix((1, 2, 8, 9), (1, 8, 9)))
def test_top_k(k: int) -> None:
    for x in (normal(37, 23), odd(5, 23), np.zeros((3, 23), np.float32)):
        check_against_jax(lambda x: lax.top_k(x, k), x)
    check_against_jax(lambda x: lax.top_k(x, k)[1], normal(23))


def test_approximate_selections_are_exact() -> None:
    for k in (3, 10):
        check_against_jax(lambda x, k=k: lax.approx_max_k(x, k), normal(5, 23))
        check_against_jax(
            lambda x, k=k: lax.approx_min_k(x, k, reduction_dimension=0), normal(23, 5)
        )
    with pytest.raises(ImportRuleError) as caught:
        graph_of(lambda x: lax.approx_max_k(x, 3, aggregate_to_topk=False), normal(5, 23))
    assert caught.value.code == "NCC_EHCA005"


def test_a_plain_float_comparator_orders_numbers() -> None:
    """Other front ends compare without the total order: zeros are equal and keep their places."""
    text = """
    func.func @main(%x: tensor<9xf32>, %i: tensor<9xi32>) -> (tensor<9xf32>, tensor<9xi32>) {
      %0:2 = "stablehlo.sort"(%x, %i) <{dimension = 0 : i64, is_stable = true}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
        %e = stablehlo.compare GT, %b, %a : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %e : tensor<i1>
      }) : (tensor<9xf32>, tensor<9xi32>) -> (tensor<9xf32>, tensor<9xi32>)
      return %0#0, %0#1 : tensor<9xf32>, tensor<9xi32>
    }"""
    x = np.array([3, 0.0, -0.0, 1, -2, 0.0, -0.0, np.inf, -np.inf], np.float32)
    order = np.argsort(x, kind="stable").astype(np.int32)
    for values, places in run_levels(import_module(text), [x, np.arange(9, dtype=np.int32)]):
        np.testing.assert_array_equal(values.view(np.int32), x[order].view(np.int32))
        np.testing.assert_array_equal(places, order)


def test_the_first_few_need_no_network() -> None:
    """Eight of 64 are eight reductions; nine are a sort."""
    x = normal(5, 64)

    def ops(k: int) -> int:
        return len(canonical(graph_of(lambda x: lax.top_k(x, k), x)).ops)

    assert ops(2) < ops(8) < 150 < ops(9)
    assert not any(op.name == "sort" for op in canonical(graph_of(jnp.sort, x)).ops)


def test_top_k_of_integers_is_refused_with_its_line() -> None:
    with pytest.raises(ImportRuleError) as caught:
        graph_of(lambda x: lax.top_k(x, 2), below(9, 4, 8))
    assert caught.value.code == "NCC_EVRF013"
    assert caught.value.loc is not None and caught.value.loc.file.endswith("test_ordering.py")


def test_argmax_and_argmin() -> None:
    for x in (normal(11, 13), odd(11, 13), below(4, 11, 13), np.full((3, 4), -np.inf, np.float32)):
        for axis in (0, 1, None):
            check_against_jax(lambda x, a=axis: jnp.argmax(x, axis=a), x)
            check_against_jax(lambda x, a=axis: jnp.argmin(x, axis=a), x)


FUNCTIONS: dict[str, Callable] = {
    "unique": lambda x: jnp.unique(jnp.round(x[0]), size=7, fill_value=0.0),
    "descending": lambda x: jnp.argsort(x, axis=1, descending=True),
    "median": lambda x: jnp.median(x, axis=1),
    "percentile": lambda x: jnp.percentile(x, 30.0),
    "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x[0]), x[1]),
    "searchsorted by sort": lambda x: jnp.searchsorted(jnp.sort(x[0]), x[1], method="sort"),
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x, axis=1), 19),
    "rank": lambda x: jnp.argsort(jnp.argsort(x, axis=1), axis=1),
}


SLOW = ("percentile", "rank", "median", "descending")
SLOWEST = ("searchsorted by sort",)


@pytest.mark.parametrize("name", long_in_matrix(FUNCTIONS, SLOW, SLOWEST))
def test_functions_made_of_them(name: str) -> None:
    check_against_jax(FUNCTIONS[name], normal(5, 19), bound=1e-6)


def test_ragged_dot() -> None:
    x, w, sizes = normal(12, 5), normal(3, 5, 7, seed=2), np.array([4, 0, 8], np.int32)
    check_against_jax(lax.ragged_dot, x, w, sizes, bound=1e-6)


def test_branches_on_data_and_on_constants() -> None:
    x = normal(4, 6)

    def switch(which, x):
        scale = 3.0
        return lax.switch(which, [lambda x: x + scale, lambda x: x * scale, jnp.sin], x)

    for which in range(3):
        check_against_jax(switch, np.int32(which), x, bound=1e-6)
    for test in (True, False):
        check_against_jax(
            lambda t, x: lax.cond(t, lambda x: (x, x + 1), lambda x: (-x, x), x), np.bool_(test), x
        )
    assert "sine" not in {op.name for op in graph_of(lambda x: switch(0, x), x).ops}


def test_a_branch_with_a_loop_and_its_gradient() -> None:
    x = normal(4)

    def loss(t, x):
        def many(x):
            return lax.fori_loop(0, 3, lambda i, c: c * x + i, x)

        return jnp.sum(lax.cond(t, many, jnp.sin, x))

    for test in (True, False):
        check_against_jax(loss, np.bool_(test), x, bound=1e-6)


def test_comparators_of_another_kind_are_refused() -> None:
    text = """
    func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
      %0 = "stablehlo.sort"(%x) <{dimension = 0 : i64, is_stable = true}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.multiply %a, %b : tensor<f32>
        %e = stablehlo.compare LT, %c, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %e : tensor<i1>
      }) : (tensor<8xf32>) -> tensor<8xf32> loc("model.py":7:0)
      return %0 : tensor<8xf32>
    }"""
    with pytest.raises(ImportRuleError) as caught:
        import_module(text)
    assert caught.value.code == "NCC_EVRF001" and "multiply" in caught.value.diagnostic.message
    assert caught.value.loc is not None and caught.value.loc.line == 7
