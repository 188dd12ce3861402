"""Gathers and scatters of every form that JAX writes, compiled, at L0 and L1 against JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.ir.printer import to_stablehlo
from tests.harnesses.agreement import assert_same_with_special_values
from tests.harnesses.case import OpCase, build_graph, case_inputs
from tests.harnesses.gather import CASES
from tests.support import xla
from tests.support.compiled import check_against_jax, levels_of, link


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def below(high: int, *shape: int, low: int = 0, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_harness_rows_at_both_levels(case: OpCase) -> None:
    graph, inputs = build_graph(case), case_inputs(case)
    wanted, program = xla.run(to_stablehlo(graph), inputs), link(graph)
    for outputs in levels_of(program, inputs):
        for have, want in zip(outputs, wanted, strict=True):
            if case.rtol == 0:
                np.testing.assert_array_equal(have, want)
            else:
                a, b = have.astype(np.float64), want.astype(np.float64)
                scale = np.sqrt(np.mean(b**2))
                np.testing.assert_allclose(a, b, rtol=case.rtol, atol=case.rtol * scale)
    assert_same_with_special_values(case, program)


def test_two_computed_indices_and_fill() -> None:
    x, i, j = normal(13, 11, 3), below(15, 37, low=-2), below(13, 37, low=-2, seed=2)
    check_against_jax(lambda x, i, j: x[i, j], x, i, j)
    check_against_jax(lambda x, i, j: x.at[i, j].get(mode="fill", fill_value=7.0), x, i, j)
    check_against_jax(lambda x, i, j: x.at[i, j].get(mode="clip"), x, i, j)
    check_against_jax(lambda x, i, j: x[i, :, j % 3], x, i, j)


def test_vmapped_dynamic_slices() -> None:
    x, start = normal(5, 40), below(40, 5, low=-3)
    check_against_jax(jax.vmap(lambda row, s: jax.lax.dynamic_slice(row, (s,), (7,))), x, start)
    update = normal(5, 7, seed=3)
    check_against_jax(
        jax.vmap(lambda row, u, s: jax.lax.dynamic_update_slice(row, u, (s,))), x, update, start
    )


def test_gradient_of_overlapping_windows() -> None:
    x, start = normal(40, 3), below(36, 19)

    def loss(x, start):
        rows = jax.vmap(lambda s: jax.lax.dynamic_slice(x, (s, 0), (5, 3)))(start)
        return jnp.sum(rows * rows)

    check_against_jax(jax.grad(loss), x, start, bound=1e-6)


def test_take_along_a_long_axis_and_back() -> None:
    x, index = normal(3, 50), below(50, 3, 40)
    check_against_jax(lambda x, i: jnp.take_along_axis(x, i, axis=1), x, index)

    def loss(x, i):
        return jnp.sum(jnp.take_along_axis(x, i, axis=1) ** 2)

    check_against_jax(jax.grad(loss), x, index, bound=1e-6)


@pytest.mark.parametrize("kind", ["set", "add", "multiply", "min", "max"])
def test_rows_picked_several_times_across_tiles(kind: str) -> None:
    x, rows, update = normal(9, 5), below(11, 300, low=-1), normal(300, 5, seed=4)
    bound = 1e-5 if kind in ("add", "multiply") else 0.0

    def put(x, rows, update):
        return getattr(x.at[rows], kind)(update)

    check_against_jax(put, x, rows, update, bound=bound)


def test_replacing_keeps_the_last_over_two_index_dims() -> None:
    x, rows, update = normal(6), below(6, 7, 150), normal(7, 150, seed=5)
    check_against_jax(lambda x, r, u: x.at[r].set(u), x, rows, update)
    check_against_jax(lambda x, r, u: x.at[r].set(u.T.reshape(7, 150)), x, rows, update)


def test_segment_sums_and_histograms() -> None:
    x, ids = normal(300, 7), below(12, 300)
    check_against_jax(lambda x, i: jax.ops.segment_sum(x, i, 12), x, ids, bound=1e-6)
    check_against_jax(lambda x, i: jax.ops.segment_max(x, i, 12), x, ids)
    check_against_jax(lambda i: jnp.bincount(i, length=12), ids)


def test_one_promise_of_unique_rows_saves_the_merge() -> None:
    x, update = normal(300, 4), normal(200, 4, seed=6)
    rows = np.random.default_rng(0).permutation(300)[:200].astype(np.int32)
    for kind in ("set", "add", "multiply"):
        check_against_jax(
            lambda x, r, u, kind=kind: getattr(x.at[r], kind)(u, unique_indices=True),
            x,
            rows,
            update,
        )
