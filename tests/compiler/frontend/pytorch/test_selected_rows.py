"""Rows that a mask selects, without torch: where they stand, and what stands elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.operators import ATEN
from shardwright.compiler.frontend.pytorch.operators.selected_rows import (
    FINITE,
    KEPT,
    RULES,
    SELECTING,
    Call,
    called,
)
from shardwright.compiler.frontend.pytorch.operators.selections import (
    Count,
    Dim,
    Selected,
    Selection,
    aligned,
    in_front,
)

LIVE = np.array([False, True, True, False, True])
OTHER = np.array([True, True, False, False, True])
ROWS = np.arange(10.0, dtype=np.float32).reshape(5, 2)

POINTWISE = ("add.Tensor", "log.default")


def rows(live: Any = LIVE, name: str = "mask", fill: Any = None) -> Selected:
    dim = Dim("u0", (Selection(name, "u0", jnp.asarray(live)),))
    return Selected(jnp.asarray(ROWS), (dim, None), fill)


def call(name: str, *args: Any, shape: tuple[Any, ...] = (), **kwargs: Any) -> Any:
    """An operator's result of torch's shape, in which "u0" is the number of rows."""
    sizes = SimpleNamespace(of=lambda size: size)
    said = SimpleNamespace(shape=shape, dtype=None)

    def row(own: tuple[int, ...]) -> Any:
        place = SimpleNamespace(shape=own, dtype=np.dtype(np.float32))
        found = ATEN[name]
        return (lambda *a, **k: found(place, *a, **k)) if ATEN.is_placed(name) else found

    names = dict.fromkeys(range(4), "mask")
    return called(Call(name, row, list(args), kwargs, said, sizes, names), name in POINTWISE)


def test_every_rule_is_of_an_operator_that_has_a_row() -> None:
    without = {name for name in (*RULES, *KEPT, *FINITE) if name not in ATEN}
    assert without == {"nonzero.default", "masked_select.default"} <= set(SELECTING)


def test_a_mask_leaves_rows_where_they_are() -> None:
    found = call("index.Tensor", jnp.asarray(ROWS), [jnp.asarray(LIVE)], shape=("u0", 2))
    np.testing.assert_array_equal(found.array, np.where(LIVE[:, None], ROWS, 0))
    assert found.fill == 0 and found.dims[0].key == ("mask",)
    assert int(found.dims[0].count) == 3


def test_a_number_of_rows_that_is_known_gives_a_plain_array() -> None:
    found = call("index.Tensor", jnp.asarray(ROWS), [jnp.asarray(LIVE)], shape=(3, 2))
    np.testing.assert_array_equal(found, ROWS[LIVE])


def test_rows_move_to_the_front_in_order() -> None:
    found = in_front(rows(), 0)
    np.testing.assert_array_equal(found.array, [*ROWS[LIVE], [0, 0], [0, 0]])
    np.testing.assert_array_equal(found.dims[0].live, [True] * 3 + [False] * 2)


def test_rows_of_two_masks_meet_in_front() -> None:
    found = call("add.Tensor", rows(), rows(OTHER, "other"), shape=("u0", 2))
    np.testing.assert_array_equal(found.array[:3], ROWS[LIVE] + ROWS[OTHER])
    same = aligned([rows(), rows(), Count(3, rows().dims[0])])
    assert [part.dims[0].key for part in same[:2]] == [("mask",), ("mask",)]


@pytest.mark.parametrize(
    ("name", "args", "want"),
    [
        ("sum.dim_IntList", ([0],), ROWS[LIVE].sum(0)),
        ("mean.dim", ([0],), ROWS[LIVE].mean(0)),
        ("amax.default", ([0],), ROWS[LIVE].max(0)),
        ("var.correction", ([0],), ROWS[LIVE].var(0, ddof=1)),
    ],
)
def test_reductions_leave_other_rows_out(name: str, args: tuple[Any, ...], want: Any) -> None:
    np.testing.assert_allclose(call(name, rows(), *args, shape=(2,)), want, rtol=1e-6)


def test_no_gradient_comes_of_rows_that_torch_has_not() -> None:
    x = jnp.asarray(np.where(LIVE[:, None], ROWS + 1, -1), jnp.float32)

    def loss(x: Any, scale: Any) -> Any:
        own = call("index.Tensor", x * scale, [jnp.asarray(LIVE)], shape=("u0", 2))
        return call("sum.default", call("log.default", own, shape=("u0", 2)))

    by_x, by_scale = jax.grad(loss, (0, 1))(x, jnp.float32(2))
    np.testing.assert_allclose(by_x, np.where(LIVE[:, None], 1 / (ROWS + 1), 0), rtol=1e-6)
    np.testing.assert_allclose(by_scale, 6 / 2, rtol=1e-6)


def test_it_passes_what_takes_trees() -> None:
    def doubled(x: Selected) -> Selected:
        return Selected(x.array * 2, x.dims, x.fill)

    found = jax.jit(jax.checkpoint(doubled))(rows(fill=0))
    np.testing.assert_array_equal(found.array, ROWS * 2)
    assert found.dims[0].key == ("mask",) and found.fill == 0


@pytest.mark.parametrize("name", ["sort.default", "flip.default", "roll.default"])
def test_what_has_no_rule_is_refused(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{name.partition('.')[0]} of rows that a mask"
    ) as caught:
        call(name, rows(), 0, shape=("u0", 2))
    assert caught.value.diagnostic.code == "SW_TORCH_VALUES"
