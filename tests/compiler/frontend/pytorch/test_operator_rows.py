"""Rows of the table of ATen's operators by themselves, without torch: the numbers are torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.operators import ATEN
from shardwright.compiler.frontend.pytorch.operators.registry import Operators, Place

F32 = np.dtype(np.float32)


def _row(name: str, shape: tuple[int, ...] = ()) -> Callable[..., Any]:
    row = ATEN[name]
    place = Place(shape, F32, lambda: jax.random.key(0))
    return partial(row, place) if ATEN.is_placed(name) else row


@pytest.mark.parametrize(
    ("name", "rest", "gradient"),
    [
        ("abs", (), [0, 1, 1, -1]),
        ("amax", (), [0, 0.5, 0.5, 0]),
        ("clamp", (0, 1), [1, 1, 1, 0]),
        ("hardtanh", (), [1, 0, 0, 0]),
        ("leaky_relu", (0.5,), [0.5, 1, 1, 0.5]),
        ("relu6", (), [0, 1, 1, 0]),
        ("median", (), [1, 0, 0, 0]),
    ],
)
def test_gradients_at_ties_and_bounds(name: str, rest: Any, gradient: list[float]) -> None:
    x = jnp.array([0.0, 1.0, 1.0, -1.0])
    found = jax.grad(lambda x: jnp.sum(_row(name)(x, *rest)))(x)
    np.testing.assert_array_equal(found, gradient)


def test_norms_and_deviations_of_zeros_have_no_gradient() -> None:
    for name, rest in (("linalg_vector_norm", (2,)), ("linalg_vector_norm", (3,)), ("std.dim", ())):
        found = jax.grad(lambda x, name=name, rest=rest: _row(name)(x, *rest))(jnp.zeros(3))
        np.testing.assert_array_equal(found, np.zeros(3))


def test_resizing_is_a_product_and_keeps_what_is_constant() -> None:
    x = jnp.arange(4.0).reshape(1, 1, 4)
    found = _row("upsample_linear1d", (1, 1, 8))(x, [8], False)
    np.testing.assert_allclose(found[0, 0], [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])
    for name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "upsample_bilinear2d"):
        same = _row(name, (1, 1, 3, 7))(jnp.ones((1, 1, 5, 4)), [3, 7], False)
        np.testing.assert_allclose(same, np.ones((1, 1, 3, 7)), rtol=1e-6)


def test_windows_come_by_slices_and_not_by_gathers() -> None:
    x = jnp.arange(12.0).reshape(1, 1, 3, 4)
    for name, rest in (
        ("im2col", ((2, 2), (1, 1), (1, 1), (1, 1))),
        ("max_pool2d_with_indices", (2,)),
        ("unfold", (3, 2, 1)),
    ):
        assert "gather" not in str(jax.make_jaxpr(lambda x, n=name, r=rest: _row(n)(x, *r))(x))
    values, index = _row("max_pool2d_with_indices")(x, 2)
    np.testing.assert_array_equal(values[0, 0], [[5, 7]])
    np.testing.assert_array_equal(index[0, 0], [[5, 7]])


def test_what_values_decide_is_refused() -> None:
    x, mask = jnp.arange(3.0), jnp.array([True, False, True])
    with pytest.raises(UsageError) as caught:
        _row("index.Tensor")(x, [mask])
    assert caught.value.diagnostic.code == "SW_TORCH_VALUES"
    np.testing.assert_array_equal(_row("index_put")(x, [mask], jnp.array(9.0)), [9, 1, 9])


def test_an_operator_has_one_row() -> None:
    table = Operators()
    table.add("relu", jnp.abs)
    with pytest.raises(KeyError, match=r"relu\.default has two rows"):
        table.add("relu.default", jnp.abs)
