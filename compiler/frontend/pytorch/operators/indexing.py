"""Reads and writes at indices that are data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.registry import ATEN

IN_BOUNDS = "promise_in_bounds"
"""torch raises for an index that lies outside, so a program that ran has none."""


def _positive(index: Any, size: int) -> Any:
    return jnp.where(index < 0, index + size, index)


@ATEN.row("embedding")
def embedding(weight: Any, indices: Any, padding_idx: int = -1, *_: Any) -> Any:
    """Rows of a table [V, E]; the row `padding_idx` has no gradient."""
    rows = weight[indices]
    if padding_idx < 0:
        return rows
    is_padding = (indices == padding_idx)[..., None]
    return jnp.where(is_padding, _stopped(rows), rows)


def _stopped(x: Any) -> Any:
    import jax

    return jax.lax.stop_gradient(x)


@ATEN.row("index_select")
def index_select(x: Any, dim: int, index: Any) -> Any:
    """Slices along a dim, by number."""
    return jnp.take(x, index, dim, mode="clip") if x.ndim else x


@ATEN.row("gather")
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """One element along a dim for each index; other dims may be shorter than those of x."""
    if not x.ndim:
        return x
    cut = [slice(0, n) for n in index.shape]
    cut[dim] = slice(None)
    return jnp.take_along_axis(x[tuple(cut)], index, dim, mode=IN_BOUNDS)


def _where(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """What `x.at` takes for one element along a dim per index."""
    where = list(jnp.ogrid[tuple(slice(0, n) for n in index.shape)])
    where[dim] = index
    return tuple(where)


@ATEN.row("scatter.src", "scatter.value")
def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    """x with one element along a dim replaced for each index."""
    return x.at[_where(x, dim, index)].set(_cut(source, index), mode=IN_BOUNDS)


@ATEN.row("scatter_add")
def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    """x with something added to one element along a dim for each index."""
    return x.at[_where(x, dim, index)].add(_cut(source, index), mode=IN_BOUNDS)


def _cut(source: Any, index: Any) -> Any:
    """The elements of a source that have an index; a number is itself."""
    is_number = not hasattr(source, "ndim") or not source.ndim
    return source if is_number else source[tuple(slice(0, n) for n in index.shape)]


@ATEN.row("scatter_reduce.two")
def scatter_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True
) -> Any:
    """x reduced with what is scattered to the same element."""
    at = x.at[_where(x, dim, index)]
    update, first = {
        "sum": ("add", 0),
        "prod": ("multiply", 1),
        "amax": ("max", -jnp.inf),
        "amin": ("min", jnp.inf),
    }[reduce]
    if not include_self:
        x = at.set(first, mode=IN_BOUNDS)
    return getattr(x.at[_where(x, dim, index)], update)(_cut(source, index), mode=IN_BOUNDS)


@ATEN.row("index_add")
def index_add(x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    """x with slices added, by number."""
    where = [slice(None)] * x.ndim
    where[dim] = index
    return x.at[tuple(where)].add(alpha * source, mode=IN_BOUNDS)


@ATEN.row("index_copy")
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    """x with slices replaced, by number."""
    where = [slice(None)] * x.ndim
    where[dim] = index
    return x.at[tuple(where)].set(source, mode=IN_BOUNDS)


def _indices(x: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        slice(None) if index is None else index if index.dtype == bool else _positive(index, n)
        for index, n in zip(indices, x.shape, strict=False)
    )


@ATEN.row("index.Tensor", "_unsafe_index.Tensor")
def index(x: Any, indices: Sequence[Any]) -> Any:
    """x[i, j, ...], NumPy's advanced indexing; None is a whole dim."""
    return x.at[_indices(x, indices)].get(mode=IN_BOUNDS)


@ATEN.row("index_put", "_unsafe_index_put")
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """x with x[i, j, ...] replaced, or added to; a mask of its shape is a choice per element."""
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype == bool and not values.ndim:
        mask = first.reshape(first.shape + (1,) * (x.ndim - first.ndim))
        return jnp.where(mask, x + values if accumulate else values, x)
    at = x.at[_indices(x, indices)]
    values = values.astype(x.dtype)
    return at.add(values, mode=IN_BOUNDS) if accumulate else at.set(values, mode=IN_BOUNDS)


@ATEN.row("masked_scatter")
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """x with the elements where mask is true replaced by those of source, in order."""
    mask = jnp.broadcast_to(mask, x.shape).reshape(-1)
    number = jnp.cumsum(mask) - 1
    taken = source.reshape(-1).at[jnp.clip(number, 0, source.size - 1)].get(mode=IN_BOUNDS)
    return jnp.where(mask, taken, x.reshape(-1)).reshape(x.shape)


@ATEN.row("one_hot", placed=True)
def one_hot(place: Any, x: Any, num_classes: int = -1) -> Any:
    """A row of zeros with a one, for each index."""
    return (x[..., None] == jnp.arange(place.shape[-1])).astype(place.dtype)


@ATEN.row("bucketize.Tensor")
def bucketize(x: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    """Between which of the sorted boundaries each lies."""
    return jnp.searchsorted(boundaries, x, side="right" if right else "left")
