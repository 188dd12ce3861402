"""Reductions, scans, softmax, sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, Place

Dims = Sequence[int] | int | None


def axes(dim: Dims) -> Any:
    """torch's dims as an axis of JAX: none and an empty list are all."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return None
    return tuple(dim) if isinstance(dim, Sequence) else dim


@ATEN.row("sum", "sum.dim_IntList", placed=True)
def total(place: Place, x: Any, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Sum along dims."""
    return jnp.sum(x, axes(dim), dtype=place.dtype, keepdims=keepdim)


@ATEN.row("mean", "mean.dim", placed=True)
def mean(place: Place, x: Any, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Mean along dims."""
    return jnp.mean(x, axes(dim), dtype=place.dtype, keepdims=keepdim)


@ATEN.row("prod", "prod.dim_int")
def product(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Product along a dim."""
    return jnp.prod(x, axes(dim), keepdims=keepdim)


@ATEN.row("amax")
def amax(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """Largest along dims."""
    return jnp.max(x, axes(dim), keepdims=keepdim)


@ATEN.row("amin")
def amin(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """Smallest along dims."""
    return jnp.min(x, axes(dim), keepdims=keepdim)


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
    return _picked(x, jnp.argmax(x, dim, keepdims=True), dim, keepdim)


@ATEN.row("min.dim")
def min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """Smallest along a dim, and its index."""
    return _picked(x, jnp.argmin(x, dim, keepdims=True), dim, keepdim)


def _picked(x: Any, index: Any, dim: int, keepdim: bool) -> Any:
    value = jnp.take_along_axis(x, index, dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@ATEN.row("argmax")
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Index of the largest."""
    return jnp.argmax(x, dim, keepdims=keepdim)


@ATEN.row("argmin")
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Index of the smallest."""
    return jnp.argmin(x, dim, keepdims=keepdim)


@ATEN.row("any", "any.dim", "any.dims")
def any_of(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """Whether one is true."""
    return jnp.any(x, axes(dim), keepdims=keepdim)


@ATEN.row("all", "all.dim", "all.dims")
def all_of(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """Whether all are true."""
    return jnp.all(x, axes(dim), keepdims=keepdim)


@ATEN.row("var.correction", "var.dim")
def variance(x: Any, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Variance along dims."""
    correction = 1 if correction is None else int(correction)
    return jnp.var(x, axes(dim), ddof=correction, keepdims=keepdim)


@ATEN.row("std.correction", "std.dim")
def deviation(x: Any, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Standard deviation along dims."""
    return jnp.sqrt(variance(x, dim, correction, keepdim))


@ATEN.row("var_mean.correction")
def variance_and_mean(x: Any, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Variance and mean along dims."""
    return variance(x, dim, correction, keepdim), jnp.mean(x, axes(dim), keepdims=keepdim)


@ATEN.row("logsumexp")
def logsumexp(x: Any, dim: Dims, keepdim: bool = False) -> Any:
    """log of the sum of exp, along dims."""
    return jax.nn.logsumexp(x, axes(dim), keepdims=keepdim)


@ATEN.row("linalg_vector_norm")
def vector_norm(
    x: Any, order: Any = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """Norm of the elements along dims."""
    if order == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), axes(dim), keepdims=keepdim))
    if order in (float("inf"), float("-inf")):
        return (jnp.max if order > 0 else jnp.min)(jnp.abs(x), axes(dim), keepdims=keepdim)
    if order == 1:
        return jnp.sum(jnp.abs(x), axes(dim), keepdims=keepdim)
    return jnp.sum(jnp.abs(x) ** order, axes(dim), keepdims=keepdim) ** (1 / order)


@ATEN.row("cumsum", placed=True)
def cumsum(place: Place, x: Any, dim: int, dtype: Any = None) -> Any:
    """Sums of all up to each."""
    return jnp.cumsum(x.astype(place.dtype), dim) if x.ndim else x


@ATEN.row("cumprod")
def cumprod(x: Any, dim: int, dtype: Any = None) -> Any:
    """Products of all up to each."""
    return jnp.cumprod(x, dim) if x.ndim else x


@ATEN.row("softmax.int", "_softmax", "_safe_softmax", placed=True)
def softmax(place: Place, x: Any, dim: int, *_: Any, **__: Any) -> Any:
    """exp(x) over its sum along a dim."""
    return jax.nn.softmax(x.astype(place.dtype), dim)


@ATEN.row("log_softmax.int", "_log_softmax", placed=True)
def log_softmax(place: Place, x: Any, dim: int, *_: Any, **__: Any) -> Any:
    """log of the softmax along a dim."""
    return jax.nn.log_softmax(x.astype(place.dtype), dim)


@ATEN.row("topk")
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The k largest, or smallest, along a dim, and their indices."""
    moved = jnp.moveaxis(x, dim, -1)
    values, index = jax.lax.top_k(moved if largest else -moved, k)
    values = values if largest else -values
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim)


@ATEN.row("sort", "sort.stable")
def sort(x: Any, *rest: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Any:
    """x sorted along a dim, and where each came from."""
    if rest:  # (dim, descending) of one overload, (stable, dim, descending) of the other
        dim, descending = (*rest[-2:], descending)[:2] if len(rest) > 1 else (rest[0], descending)
    index = jnp.argsort(x, dim, descending=descending)
    return jnp.take_along_axis(x, index, dim), index


@ATEN.row("argsort", "argsort.stable")
def argsort(x: Any, *rest: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Any:
    """Where each of the sorted came from."""
    return sort(x, *rest, dim=dim, descending=descending)[1]
