"""Reads and writes at indices that are data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.registry import ATEN
from shardwright.compiler.frontend.pytorch.operators.selections import is_mask, ranks, selected

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
    return jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)


SUM, MEAN, MAX = range(3)
"""What becomes of the rows of a bag."""


@ATEN.row("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Rows of a table [V, E] reduced by bag, that begin at offsets [B]: ([B, E], the bag of each
    index, the size of each bag, the largest's indices)."""
    count = offsets.shape[0] - include_last_offset
    bag = jnp.searchsorted(offsets[:count], jnp.arange(indices.shape[0]), side="right") - 1
    is_counted = (indices != padding_idx) | (padding_idx < 0)
    sizes = jnp.zeros(count, jnp.int32).at[bag].add(is_counted.astype(jnp.int32))
    rows = weight.at[indices].get(mode=IN_BOUNDS)
    if mode == MAX:
        least = jnp.full((count, weight.shape[1]), -jnp.inf, weight.dtype)
        rows = jnp.where(is_counted[:, None], rows, -jnp.inf)
        best = _extreme_at(least, (bag,), rows, "amax")
        found = jnp.where(sizes[:, None] == 0, 0, best)
    else:
        scale = is_counted.astype(weight.dtype)
        scale = scale if per_sample_weights is None else scale * per_sample_weights
        found = jnp.zeros((count, weight.shape[1]), weight.dtype).at[bag].add(rows * scale[:, None])
        if mode == MEAN:
            found = found / jnp.maximum(sizes, 1)[:, None]
    return found, bag, sizes, sizes


@ATEN.row("index_select")
def index_select(x: Any, dim: int, index: Any) -> Any:
    """Slices along a dim, by number."""
    return jnp.take(x, index.reshape(-1), dim, mode="clip") if x.ndim else x


@ATEN.row("gather")
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """One element along a dim for each index; other dims may be shorter than those of x."""
    if not index.size:
        return jnp.zeros(index.shape, x.dtype)
    if not x.ndim or not index.ndim:  # then the other one has one element or one dim
        return x.reshape(-1).at[index].get(mode=IN_BOUNDS)
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
    if not x.ndim:
        return jnp.broadcast_to(_cut(source, index), x.shape)
    return x.at[_where(x, dim, index)].set(_cut(source, index), mode=IN_BOUNDS)


@ATEN.row("scatter_add")
def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    """x with something added to one element along a dim for each index."""
    return x.at[_where(x, dim, index)].add(_cut(source, index), mode=IN_BOUNDS)


def _cut(source: Any, index: Any) -> Any:
    """The elements of a source that have an index; a number is itself."""
    is_number = not hasattr(source, "ndim") or not source.ndim
    return source if is_number else source[tuple(slice(0, n) for n in index.shape)]


@ATEN.row("scatter.reduce", "scatter.value_reduce")
def scatter_with(x: Any, dim: int, index: Any, source: Any, reduce: str) -> Any:
    """x with something added to, or multiplied into, one element along a dim for each index."""
    at = x.at[_where(x, dim, index)]
    update = at.add if reduce == "add" else at.multiply
    return update(_cut(source, index), mode=IN_BOUNDS)


def _neutral(reduce: str, dtype: Any) -> Any:
    """What changes nothing that it is reduced with."""
    if reduce in ("amax", "amin"):
        is_float = jnp.issubdtype(dtype, jnp.floating)
        limits = None if is_float else jnp.iinfo(dtype)
        least, most = (-jnp.inf, jnp.inf) if limits is None else (limits.min, limits.max)
        return least if reduce == "amax" else most
    return 1 if reduce == "prod" else 0


def _updated(at: Any, source: Any, reduce: str) -> Any:
    """Elements of an array (`at` of JAX) reduced with a source; for a mean, its sum."""
    update = {"prod": at.multiply, "amax": at.max, "amin": at.min}.get(reduce, at.add)
    return update(source, mode=IN_BOUNDS)


def _reduced_at(x: Any, where: Any, source: Any, reduce: str, include_self: bool) -> Any:
    """x reduced with a source at indices."""
    first = x
    if not include_self:
        first = x.at[where].set(_neutral(reduce, x.dtype), mode=IN_BOUNDS)
    if reduce in ("amax", "amin"):
        return _extreme_at(first, where, source, reduce)
    found = _updated(first.at[where], source, reduce)
    if reduce != "mean":
        return found
    ones = jnp.full(jnp.shape(source), 1, x.dtype)
    count = jnp.full_like(x, int(include_self)).at[where].add(ones, mode=IN_BOUNDS)
    if not include_self:
        count = jnp.where(count == 0, 1, count)
    return found // count if jnp.issubdtype(x.dtype, jnp.integer) else found / count


def _extreme_at(x: Any, where: Any, source: Any, reduce: str) -> Any:
    """The largest, or smallest, of x and what is scattered there; JAX has no gradient of it, and
    this is torch's: shared out evenly among those that are equal to it."""
    held, given = (jax.lax.stop_gradient(part) for part in (x, source))
    best = _updated(held.at[where], given, reduce)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return best
    mine = x == best
    theirs = given == best.at[where].get(mode=IN_BOUNDS)
    count = mine.astype(x.dtype).at[where].add(theirs.astype(x.dtype), mode=IN_BOUNDS)
    share = 1 / jnp.where(count == 0, 1, count)
    moved = jnp.where(mine, (x - held) * share, 0)  # zeros that carry the gradient
    theirs = jnp.where(theirs, (source - given) * share.at[where].get(mode=IN_BOUNDS), 0)
    return best + moved.at[where].add(theirs, mode=IN_BOUNDS)


@ATEN.row("scatter_reduce.two")
def scatter_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True
) -> Any:
    """x reduced with what is scattered to the same element."""
    where = _where(x, dim, index)
    return _reduced_at(x, where, _cut(source, index), reduce, include_self)


@ATEN.row("index_reduce")
def index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True
) -> Any:
    """x reduced with slices, by number."""
    return _reduced_at(x, _along(x, dim, index), source, reduce, include_self)


def _along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """What `x.at` takes for slices along a dim."""
    where: list[Any] = [slice(None)] * x.ndim
    if x.ndim:
        where[dim] = index
    return tuple(where)


@ATEN.row("index_add")
def index_add(x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    """x with slices added, by number."""
    if not x.ndim:
        return x + alpha * jnp.sum(source)
    return x.at[_along(x, dim, index)].add(alpha * source, mode=IN_BOUNDS)


@ATEN.row("index_copy")
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    """x with slices replaced, by number."""
    if not x.ndim:
        return source.reshape(())
    return x.at[_along(x, dim, index)].set(source, mode=IN_BOUNDS)


@ATEN.row("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    """x with one value in slices, by number."""
    if not x.ndim:
        return jnp.full_like(x, value)
    index = _positive(index, x.shape[dim])
    return x.at[_along(x, dim, index)].set(value, mode=IN_BOUNDS)


@ATEN.row("take")
def take(x: Any, index: Any) -> Any:
    """Elements of x as one row, by number."""
    return x.reshape(-1).at[_positive(index, x.size)].get(mode=IN_BOUNDS)


@ATEN.row("put")
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """x with elements replaced, or added to, by number as of one row."""
    at = x.reshape(-1).at[_positive(index, x.size).reshape(-1)]
    update = at.add if accumulate else at.set
    return update(source.reshape(-1), mode=IN_BOUNDS).reshape(x.shape)


@ATEN.row("masked_scatter")
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """x with the elements of a source, in order, where the mask is."""
    mask = jnp.broadcast_to(mask, x.shape)
    if not source.size:
        return x
    found = read_in_order(source.reshape(-1), mask.reshape(-1)).reshape(x.shape)
    return jnp.where(mask, found, x)


def read_in_order(rows: Any, mask: Any, axis: int = 0) -> Any:
    """The next of the rows along an axis for each element of a mask [N] that is true; of others it
    is one of them, too."""
    return jnp.take(rows, ranks(mask), axis, mode="clip")


def _indices(x: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
    if any(index is not None and index.dtype == bool for index in indices):
        raise selected("a mask that says which rows are taken")
    return tuple(
        slice(None) if index is None else _positive(index, n)
        for index, n in zip(indices, x.shape, strict=False)
    )


@ATEN.row("index.Tensor", "_unsafe_index.Tensor")
def index(x: Any, indices: Sequence[Any]) -> Any:
    """x[i, j, ...], NumPy's advanced indexing; None is a whole dim."""
    return x.at[_indices(x, indices)].get(mode=IN_BOUNDS)


@ATEN.row("index_put", "_unsafe_index_put")
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """x with x[i, j, ...] replaced, or added to; a mask is a choice per element."""
    given = [n for n, places in enumerate(indices) if places is not None]
    first = indices[given[0]]
    if len(given) == 1 and is_mask(first):
        return _put_where(x, first, given[0], values, accumulate)
    at = x.at[_indices(x, indices)]
    values = values.astype(x.dtype)
    return at.add(values, mode=IN_BOUNDS) if accumulate else at.set(values, mode=IN_BOUNDS)


def _put_where(x: Any, mask: Any, axis: int, values: Any, accumulate: bool) -> Any:
    """x with values for the elements of a mask of its dims from an axis on."""
    rest = x.ndim - axis - mask.ndim
    place = values.ndim - rest - 1  # of the elements in the values, which may be for all alike
    if place >= 0:
        is_each = values.shape[place] != 1
        values = read_in_order(values, mask.reshape(-1), place) if is_each else values
        dims = mask.shape if is_each else (1,) * mask.ndim
        values = values.reshape(*values.shape[:place], *dims, *values.shape[place + 1 :])
    where = mask.reshape(mask.shape + (1,) * rest)
    return jnp.where(where, x + values if accumulate else values, x)


@ATEN.row("one_hot", placed=True)
def one_hot(place: Any, x: Any, num_classes: int = -1) -> Any:
    """A row of zeros with a one, for each index."""
    return (x[..., None] == jnp.arange(place.shape[-1])).astype(place.dtype)


@ATEN.row("bucketize.Tensor")
def bucketize(x: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    """Between which of the sorted boundaries each lies."""
    return jnp.searchsorted(boundaries, x, side="right" if right else "left")


@ATEN.row("searchsorted.Tensor")
def searchsorted(
    boundaries: Any,
    x: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Between which of the boundaries, sorted along the last dim, each lies."""
    if sorter is not None:
        boundaries = jnp.take_along_axis(boundaries, sorter, -1)
    is_after = right or side == "right"
    if boundaries.ndim == 1:
        return jnp.searchsorted(boundaries, x, side="right" if is_after else "left")
    pairs = boundaries[..., None, :], x[..., :, None]
    return jnp.sum(pairs[0] <= pairs[1] if is_after else pairs[0] < pairs[1], -1)
