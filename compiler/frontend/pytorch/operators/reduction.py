"""Reductions, scans, softmax, sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.gradients import absolute
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, Place

Dims = Sequence[int] | int | None


def axes(dim: Dims, rank: int = 1) -> Any:
    """torch's dims as an axis of JAX: none and an empty list are all, and so are those of a tensor
    of rank 0."""
    if dim is None or not rank or (isinstance(dim, Sequence) and not dim):
        return None
    return tuple(dim) if isinstance(dim, Sequence) else dim


@ATEN.row("sum", "sum.dim_IntList", placed=True)
def total(place: Place, x: Any, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Sum along dims."""
    return jnp.sum(x, axes(dim, x.ndim), dtype=place.dtype, keepdims=keepdim)


@ATEN.row("mean", "mean.dim", placed=True)
def mean(place: Place, x: Any, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Mean along dims."""
    return jnp.mean(x, axes(dim, x.ndim), dtype=place.dtype, keepdims=keepdim)


@ATEN.row("prod", "prod.dim_int", placed=True)
def product(place: Place, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Product along a dim."""
    return jnp.prod(x, axes(dim, x.ndim), dtype=place.dtype, keepdims=keepdim)


@ATEN.row("amax")
def amax(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """Largest along dims."""
    return jnp.max(x, axes(dim, x.ndim), keepdims=keepdim)


@ATEN.row("amin")
def amin(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """Smallest along dims."""
    return jnp.min(x, axes(dim, x.ndim), keepdims=keepdim)


@ATEN.row("max")
def largest(x: Any) -> Any:
    """Largest of all."""
    return jnp.max(x)


@ATEN.row("min")
def smallest(x: Any) -> Any:
    """Smallest of all."""
    return jnp.min(x)


@ATEN.row("max.dim")
def max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """Largest along a dim, and its index; the gradient goes to that one."""
    return _picked(x, argmax(x, dim, True), dim, keepdim)


@ATEN.row("min.dim")
def min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """Smallest along a dim, and its index."""
    return _picked(x, argmin(x, dim, True), dim, keepdim)


def _picked(x: Any, index: Any, dim: int, keepdim: bool) -> Any:
    """(x at one index along a dim, the index)."""
    if not x.ndim:
        return x, index
    value = jnp.take_along_axis(x, index, dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@ATEN.row("argmax")
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Index of the largest, the first of several."""
    return jnp.argmax(x, dim if x.ndim else None, keepdims=keepdim)


@ATEN.row("argmin")
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Index of the smallest, the first of several."""
    return jnp.argmin(x, dim if x.ndim else None, keepdims=keepdim)


@ATEN.row("aminmax")
def aminmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Smallest and largest along a dim, or of all."""
    dim = dim if x.ndim else None
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


@ATEN.row("kthvalue")
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest along a dim, and its index."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    index = jax.lax.slice_in_dim(jnp.argsort(x, dim), k - 1, k, axis=dim)
    return _picked(x, index, dim, keepdim)


@ATEN.row("median.dim")
def median_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The middle one along a dim, the lower of two, and its index; a NaN where there is one."""
    return _middle(x, dim, keepdim, ignores_nan=False)


@ATEN.row("nanmedian.dim")
def nanmedian_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The middle one along a dim of those that are no NaN, and its index."""
    return _middle(x, dim, keepdim, ignores_nan=True)


@ATEN.row("median")
def median(x: Any) -> Any:
    """The middle one of all, the lower of two; the gradient is shared out among its equals."""
    return _shared(x, median_dim(x.reshape(-1), 0)[0])


@ATEN.row("nanmedian")
def nanmedian(x: Any) -> Any:
    """The middle one of all that are no NaN."""
    return _shared(x, nanmedian_dim(x.reshape(-1), 0)[0])


def _shared(x: Any, value: Any) -> Any:
    """A value of x with the gradient of all that are equal to it, shared out evenly."""
    value, held = jax.lax.stop_gradient((value, x))
    is_equal = (x == value) | (jnp.isnan(x) & jnp.isnan(value))
    moved = jnp.sum(jnp.where(is_equal, x - held, 0)) / jnp.sum(is_equal)
    return value + jnp.where(jnp.isnan(value), 0, moved)


def _middle(x: Any, dim: int, keepdim: bool, ignores_nan: bool) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    order = jnp.argsort(x, dim)  # NaN are the last
    numbers = jnp.sum(~jnp.isnan(x), dim, keepdims=True)
    size = x.shape[dim]
    if ignores_nan:
        place = jnp.maximum(numbers - 1, 0) // 2
    else:
        place = jnp.where(numbers == size, (size - 1) // 2, numbers)
    return _picked(x, jnp.take_along_axis(order, place, dim), dim, keepdim)


@ATEN.row("cummax")
def cummax(x: Any, dim: int) -> Any:
    """The largest up to each, and its index, the last of several."""
    return _running(x, dim, jnp.greater_equal)


@ATEN.row("cummin")
def cummin(x: Any, dim: int) -> Any:
    """The smallest up to each, and its index, the last of several."""
    return _running(x, dim, jnp.less_equal)


def _running(x: Any, dim: int, is_before: Any) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)

    def later(a: Any, b: Any) -> Any:
        takes = is_before(b[0], a[0]) | jnp.isnan(b[0])
        takes &= ~jnp.isnan(a[0]) | jnp.isnan(b[0])
        return jnp.where(takes, b[0], a[0]), jnp.where(takes, b[1], a[1])

    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
    held = jax.lax.stop_gradient(x)
    _, index = jax.lax.associative_scan(later, (held, places), axis=dim % x.ndim)
    return jnp.take_along_axis(x, index, dim), index


@ATEN.row("logcumsumexp")
def logcumsumexp(x: Any, dim: int) -> Any:
    """log of the sum of exp of all up to each."""
    return jax.lax.associative_scan(jnp.logaddexp, x, axis=dim % x.ndim) if x.ndim else x


@ATEN.row("histc", placed=True)
def histc(place: Place, x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """How many lie in each of so many equal parts between min and max: those of x, if equal."""
    low, high = (min, max) if min != max else (jnp.min(x), jnp.max(x))
    x = x.reshape(-1).astype(jnp.float32)
    part = jnp.floor((x - low) * bins / (high - low))
    part = jnp.where(x == high, bins - 1, part)
    is_counted = (x >= low) & (x <= high)
    is_mine = (part[:, None] == jnp.arange(bins)) & is_counted[:, None]
    return jnp.sum(is_mine, 0, dtype=place.dtype)


@ATEN.row("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(x: Any, dim: Dims = None) -> Any:
    """How many are not zero along dims."""
    return jnp.sum(x != 0, axes(dim, x.ndim))


@ATEN.row("any", "any.dim", "any.dims")
def any_of(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """Whether one is true."""
    return jnp.any(x, axes(dim, x.ndim), keepdims=keepdim)


@ATEN.row("all", "all.dim", "all.dims")
def all_of(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """Whether all are true."""
    return jnp.all(x, axes(dim, x.ndim), keepdims=keepdim)


@ATEN.row("var.correction", "var.dim")
def variance(x: Any, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Variance along dims: squares over the number of elements less `correction`, at least 0."""
    along = axes(dim, x.ndim)
    centred = x - jnp.mean(x, along, keepdims=True)
    total = jnp.sum(jnp.square(centred), along, keepdims=keepdim)
    count = x.size // max(1, total.size) if x.size else 0
    return total / jnp.float32(max(0.0, count - (1 if correction is None else correction)))


@ATEN.row("std.correction", "std.dim")
def deviation(x: Any, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Standard deviation along dims."""
    return root(variance(x, dim, correction, keepdim))


def root(x: Any) -> Any:
    """The square root, whose gradient at 0 is 0: that of a norm and of a deviation."""
    is_zero = x == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


@ATEN.row("var_mean.correction")
def variance_and_mean(x: Any, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Variance and mean along dims."""
    return variance(x, dim, correction, keepdim), jnp.mean(x, axes(dim, x.ndim), keepdims=keepdim)


@ATEN.row("std_mean.correction")
def deviation_and_mean(x: Any, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Standard deviation and mean along dims."""
    return deviation(x, dim, correction, keepdim), jnp.mean(x, axes(dim, x.ndim), keepdims=keepdim)


@ATEN.row("logsumexp")
def logsumexp(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """log of the sum of exp, along dims."""
    return jax.nn.logsumexp(x, axes(dim, x.ndim), keepdims=keepdim)


@ATEN.row("linalg_vector_norm", placed=True)
def vector_norm(
    place: Place,
    x: Any,
    order: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Any:
    """Norm of the elements along dims, whose gradient where they are all 0 is 0."""
    return norm(x.astype(place.dtype), order, axes(dim, x.ndim), keepdim)


def norm(x: Any, order: float, along: Any = None, keepdim: bool = False) -> Any:
    """Norm of the elements along axes."""
    if order == 2:
        return root(jnp.sum(jnp.square(x), along, keepdims=keepdim))
    size = absolute(x)
    if order == 0:
        return jnp.sum(x != 0, along, dtype=x.dtype, keepdims=keepdim)
    if order in (float("inf"), float("-inf")):
        return (jnp.max if order > 0 else jnp.min)(size, along, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, along, keepdims=keepdim)
    is_zero = size == 0
    powers = jnp.where(is_zero, 1, size) ** order
    powers = jnp.where(is_zero, 0 if order > 0 else jnp.inf, powers)
    total = jnp.sum(powers, along, keepdims=keepdim)
    is_end = (total == 0) | jnp.isinf(total)
    return jnp.where(is_end, total ** (1 / order), jnp.where(is_end, 1, total) ** (1 / order))


@ATEN.row("cumsum", placed=True)
def cumsum(place: Place, x: Any, dim: int, dtype: Any = None) -> Any:
    """Sums of all up to each."""
    return jnp.cumsum(x.astype(place.dtype), dim) if x.ndim else x


@ATEN.row("cumprod", placed=True)
def cumprod(place: Place, x: Any, dim: int, dtype: Any = None) -> Any:
    """Products of all up to each."""
    return jnp.cumprod(x.astype(place.dtype), dim) if x.ndim else x


@ATEN.row("softmax.int", "_softmax", placed=True)
def softmax(place: Place, x: Any, dim: int, *_: Any, **__: Any) -> Any:
    """exp(x) over its sum along a dim."""
    x = x.astype(place.dtype)
    return jax.nn.softmax(x, dim) if x.ndim else jnp.ones_like(x)


@ATEN.row("_safe_softmax", placed=True)
def safe_softmax(place: Place, x: Any, dim: int, *_: Any, **__: Any) -> Any:
    """exp(x) over its sum along a dim; 0 where all of it are minus infinity."""
    is_dead = jnp.all(jnp.isneginf(x), dim, keepdims=True)
    return jnp.where(is_dead, 0, softmax(place, jnp.where(is_dead, 0, x), dim))


@ATEN.row("log_softmax.int", "_log_softmax", placed=True)
def log_softmax(place: Place, x: Any, dim: int, *_: Any, **__: Any) -> Any:
    """log of the softmax along a dim."""
    x = x.astype(place.dtype)
    return jax.nn.log_softmax(x, dim) if x.ndim else jnp.zeros_like(x)


@ATEN.row("topk")
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The k largest, or smallest, along a dim, and their indices."""
    if not x.ndim:
        return x.reshape(()), jnp.zeros((), jnp.int32)
    moved = jnp.moveaxis(x, dim, -1)
    if largest:
        values, index = jax.lax.top_k(moved, k)
    else:
        index = jnp.argsort(moved, -1)[..., :k]
        values = jnp.take_along_axis(moved, index, -1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim)


@ATEN.row("sort")
def sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    """x sorted along a dim, and where each came from; equal ones stay in order."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    index = jnp.argsort(x, dim, descending=descending)
    return jnp.take_along_axis(x, index, dim), index


@ATEN.row("sort.stable")
def sort_stable(x: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    """x sorted along a dim, and where each came from."""
    return sort(x, dim, descending)


@ATEN.row("argsort")
def argsort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    """Where each of the sorted came from."""
    return sort(x, dim, descending)[1]


@ATEN.row("argsort.stable")
def argsort_stable(x: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    """Where each of the sorted came from."""
    return sort(x, dim, descending)[1]
