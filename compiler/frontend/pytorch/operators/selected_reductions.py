"""Reductions, products and losses over rows that a mask selects (`selected_rows.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.losses import MEAN, NONE
from shardwright.compiler.frontend.pytorch.operators.reduction import root
from shardwright.compiler.frontend.pytorch.operators.selected_rows import (
    RULES,
    Call,
    axes_of,
    dim_at,
    filled,
    is_over_rows,
    joint_dims,
    lowest,
    mapped,
)
from shardwright.compiler.frontend.pytorch.operators.selections import (
    Dims,
    Selected,
    live_of,
    plain,
    positions_of,
    ranks,
    replaced,
)


def _highest(dtype: Any) -> Any:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return (jnp.finfo if is_float else jnp.iinfo)(dtype).max


def _below_all(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else lowest(dtype)


def _above_all(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else _highest(dtype)


_WITHOUT_EFFECT: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("sum", "sum.dim_IntList", "cumsum"), lambda _: 0),
    **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), lambda _: 0),
    **dict.fromkeys(("any", "any.dim", "any.dims"), lambda _: 0),
    **dict.fromkeys(("all", "all.dim", "all.dims", "prod", "prod.dim_int", "cumprod"), lambda _: 1),
    **dict.fromkeys(("amax", "max"), _below_all),
    **dict.fromkeys(("amin", "min"), _above_all),
    **dict.fromkeys(("softmax.int", "_softmax", "log_softmax.int", "_log_softmax"), lowest),
}
"""Operators along dims -> what changes nothing along them, by type. It is finite for exponentials,
which would make NaN of rows all of which are minus infinity."""


@RULES.row(*_WITHOUT_EFFECT)
def reduction(call: Call) -> Any:
    """Elements along dims, those of no row left out."""
    x = call.args[0]
    if not isinstance(x, Selected):
        return call.results()
    if is_over_rows(x, axes_of(call, call.argument(1, "dim"))):
        value = _WITHOUT_EFFECT[call.name.removesuffix(".default")](x.dtype)
        call = call.with_arguments({0: filled(x, value)})
    return call.results()


@RULES.row("linalg_vector_norm")
def vector_norm(call: Call) -> Any:
    """Norm along dims; where no row is there are zeros, and ones where it is of single rows."""
    x, order = call.args[0], call.argument(1, "ord", 2)
    over_rows = is_over_rows(x, axes_of(call, call.argument(2, "dim")))
    if over_rows and order < 0:
        raise call.refused()
    return call.with_arguments({0: filled(x, 0 if over_rows else 1)}).results()


@dataclass(frozen=True, slots=True)
class _Moments:
    """Means over dims with rows of a mask."""

    x: Selected
    axes: tuple[int, ...]
    keepdim: bool

    @property
    def count(self) -> Any:
        """How many elements are reduced to one."""
        dims = [self.x.dims[n] for n in self.axes]
        static = math.prod(self.x.shape[n] for n in self.axes if not self.x.dims[n])
        return math.prod((dim.count for dim in dims if dim), start=static)

    def sum(self, array: Any, keepdim: bool) -> Any:
        return jnp.sum(jnp.where(self.x.live, array, 0), self.axes, keepdims=keepdim)

    @property
    def mean(self) -> Any:
        return self.sum(self.x.array, self.keepdim) / self.count

    def variance(self, correction: Any) -> Any:
        centre = self.sum(self.x.array, True) / self.count
        squares = self.sum(jnp.square(self.x.filled(0) - centre), self.keepdim)
        less = 1 if correction is None else correction
        return squares / jnp.maximum(self.count - less, 0)


def _moments(call: Call, keepdim_place: int) -> _Moments | None:
    x, axes = call.args[0], axes_of(call, call.argument(1, "dim"))
    if not is_over_rows(x, axes):
        return None
    return _Moments(x, tuple(axes), bool(call.argument(keepdim_place, "keepdim", False)))


@RULES.row("mean", "mean.dim")
def mean(call: Call) -> Any:
    """Mean of the rows that count."""
    moments = _moments(call, 2)
    return call.results(moments and moments.mean)


@RULES.row("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
@RULES.row("var.dim", "std.dim")
def variance(call: Call) -> Any:
    """Variance, or its root, of the rows that count, perhaps with their mean."""
    moments = _moments(call, 3)
    if moments is None:
        return call.filled(1).results()
    found = moments.variance(call.argument(2, "correction"))
    found = root(found) if call.name.startswith("std") else found
    return call.results([found, moments.mean] if "mean" in call.name else found)


@RULES.row("max.dim", "min.dim", "argmax", "argmin")
def extreme(call: Call) -> Any:
    """The first largest, or smallest, along a dim, and its number among the rows that count."""
    x, dim = call.args[0], call.argument(1, "dim")
    if not isinstance(x, Selected) or not is_over_rows(x, axes_of(call, dim)):
        return call.results()
    if dim is None:
        raise call.refused()
    value = _below_all if "max" in call.name else _above_all
    own = x.dims[dim % x.ndim]
    assert own is not None
    number = ranks(own.live)
    call = call.with_arguments({0: filled(x, value(x.dtype))})
    if call.name.startswith("arg"):
        return call.results(number[plain(call.results())])
    best, index = call.results()
    return [best, mapped(index, lambda places: number[places])]


_CONTRACTED: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot"), (0, -2)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), (1, -2)),
    "linear": (0, -1),
}
"""Products -> the place of the first factor, whose last dim is summed over, and the dim of the
second that is."""


@RULES.row(*_CONTRACTED)
def product(call: Call) -> Any:
    """A product, with zeros along a dim of rows that it sums over."""
    place, of_second = _CONTRACTED[call.name.removesuffix(".default")]
    first, second = call.args[place : place + 2]
    rank = len(second.shape)
    dims = (dim_at(first, -1), dim_at(second, of_second if rank > 1 else -1))
    if len({dim.key if dim else None for dim in dims}) > 1:
        raise call.refused(" over two sizes")
    if not any(dims):
        return call.results()
    return call.with_arguments({place: filled(first, 0), place + 1: filled(second, 0)}).results()


@RULES.row("einsum")
def einsum(call: Call) -> Any:
    """Einstein's sum, with zeros where no row is."""
    return call.filled(0).results()


@RULES.row("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def likelihood(call: Call) -> Any:
    """Losses of classes; where no row is the target is the one that counts not."""
    x, target = call.args[:2]
    has_chances = jnp.issubdtype(target.dtype, jnp.floating)
    classes = 0 if x.ndim == 1 else 1
    if is_over_rows(x, [classes]):
        if has_chances or call.argument(5, "label_smoothing", 0) or call.argument(2, "weight"):
            raise call.refused(" that are classes")
        positions = positions_of(x.dims[classes])
        x = filled(x, lowest(x.dtype))
        target = mapped(target, lambda n: jnp.where(n < 0, n, positions[n]))
    if not has_chances:
        target = filled(target, call.argument(4, "ignore_index", -100))
        return call.with_arguments({0: x, 1: target}).results()
    rows = tuple(d for n, d in enumerate(joint_dims(call)) if n != classes)
    return _loss(call, 3, rows)


_REDUCTIONS = {
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"), 2),
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}
"""Losses of single elements -> the place of their reduction."""


@RULES.row(*_REDUCTIONS)
def loss(call: Call) -> Any:
    """Losses of elements, their sum, or the mean of those that count."""
    return _loss(call.filled(1), _REDUCTIONS[call.name.removesuffix(".default")], joint_dims(call))


def _loss(call: Call, place: int, dims: Dims) -> Any:
    reduction = call.argument(place, "reduction", MEAN)
    if reduction == NONE:
        return call.results()
    args, kwargs = list(call.args[: place + 1]), {**call.kwargs, "reduction": NONE}
    if len(args) > place:
        args[place] = kwargs.pop("reduction")
    args += call.args[place + 1 :]
    losses = call.row(())(*replaced(args, plain), **replaced(kwargs, plain))
    total = jnp.sum(jnp.where(live_of(dims), losses, 0))
    if reduction != MEAN:
        return total
    pairs = zip(dims, losses.shape[-len(dims) :] if dims else (), strict=True)
    outer = math.prod(losses.shape[: losses.ndim - len(dims)])
    return total / math.prod((d.count if d else n for d, n in pairs), start=outer)
