"""Rows that a mask selects: how they come about, are read and are written (`selected_rows.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.indexing import read_in_order
from shardwright.compiler.frontend.pytorch.operators.selected_rows import (
    RULES,
    Call,
    axes_of,
    dim_at,
    filled,
    is_over_rows,
    joint_dims,
    mapped,
    wrapped,
)
from shardwright.compiler.frontend.pytorch.operators.selections import (
    Dim,
    Dims,
    Selected,
    Selection,
    dims_in,
    in_front,
    is_mask,
    live_of,
    plain,
    ranks,
)


@RULES.row("embedding")
def embedding(call: Call) -> Any:
    """Rows of a table, the first one where no row is."""
    if isinstance(call.args[0], Selected):
        raise call.refused()
    return call.filled(0).results()


@RULES.row("gather", "index_select")
def gather(call: Call) -> Any:
    """Elements along a dim by number."""
    x, dim, places = call.args[:3]
    if is_over_rows(x, axes_of(call, dim)):
        x = in_front(x, dim % x.ndim)
    return call.with_arguments({0: x, 2: filled(places, 0)}).results()


@RULES.row("index_add", "scatter_add")
def added(call: Call) -> Any:
    """x with something added by number: zeros, to the first, where no row is."""
    x, _, places, source = call.args[:4]
    if isinstance(x, Selected):
        raise call.refused()
    return call.with_arguments({2: filled(places, 0), 3: filled(source, 0)}).results()


def _selection(call: Call, mask: Any, leaf: int, size: Any) -> Selection:
    """What a mask of any dims selects, its elements in order; `leaf` is its place in the call."""
    dims = mask.dims if isinstance(mask, Selected) else ()
    live = mask.filled(False) if isinstance(mask, Selected) else mask
    name = f"{call.masks[leaf]} {[dim.key if dim else None for dim in dims]}" if any(dims) else ""
    return Selection(name or call.masks[leaf], size, live.reshape(-1))


def _numbers(mask: Any, selection: Selection) -> list[Any]:
    """Indices of what a mask selects along each of its dims."""
    dims = mask.dims if isinstance(mask, Selected) else (None,) * mask.ndim
    places = jnp.unravel_index(jnp.arange(mask.size), mask.shape) if mask.ndim else ()
    numbers = [ranks(d.live)[p] if d else p for d, p in zip(dims, places, strict=True)]
    own = (Dim(selection.size, (selection,)),)
    return [filled(Selected(n.astype(jnp.int32), own), 0) for n in numbers]


@RULES.row("nonzero")
def nonzero(call: Call) -> Any:
    """The indices of what is not zero, [rows, dims], each where the element is."""
    x = call.args[0]
    mask = mapped(x, lambda array: array != 0)
    size = call.sizes.of(call.said.shape[0])
    selection = _selection(call, mask, 0, size)
    numbers = [plain(n) for n in _numbers(mask, selection)]
    array = jnp.stack(numbers, -1) if numbers else jnp.zeros((1, 0), jnp.int32)
    return _selected(array, (None,), 0, selection)


def _selected(array: Any, others: Dims, axis: int, selection: Selection) -> Any:
    """An array whose dim `axis` is that of a selection, without the elements of other rows."""
    dims = (*others[:axis], Dim(selection.size, (selection,)), *others[axis:])
    found = Selected(array, dims)
    if not isinstance(selection.size, int):
        return filled(found, 0)
    front = in_front(found, axis, selection.size)  # a number of rows that the code states
    return wrapped(front.array, (*others[:axis], None, *others[axis:]), 0)


@RULES.row("masked_select")
def masked_select(call: Call) -> Any:
    """Elements of x where the mask is, in order."""
    dims, (x, mask) = joint_dims(call), call.args
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    dims = (None,) * (len(shape) - len(dims)) + dims
    live = jnp.broadcast_to(_filled_plain(mask, False) & live_of(dims), shape).reshape(-1)
    size = call.sizes.of(call.said.shape[0])
    name = f"{call.masks[1]} {shape} {[dim.key if dim else None for dim in dims]}"
    array = jnp.broadcast_to(plain(x), shape).reshape(-1)
    return _selected(array, (), 0, Selection(name, size, live))


def _filled_plain(x: Any, value: Any) -> Any:
    return plain(filled(x, value))


@RULES.row("index.Tensor", "_unsafe_index.Tensor")
def index(call: Call) -> Any:
    """x at a mask, x at indices, or at both."""
    x, indices = call.args
    given = [n for n, i in enumerate(indices) if i is not None]
    mask = indices[given[0]]
    dims = x.dims if isinstance(x, Selected) else (None,) * x.ndim
    if len(given) == 1 and is_mask(mask):
        axis, rank = given[0], mask.ndim
        size = call.sizes.of(call.said.shape[axis])
        selection = _selection(call, mask, 1 + axis, size)
        shape = (*x.shape[:axis], selection.live.shape[0], *x.shape[axis + rank :])
        others = (*dims[:axis], *dims[axis + rank :])
        return _selected(plain(x).reshape(shape), others, axis, selection)
    every = _as_numbers(call, indices)
    for n, places in enumerate(every):
        if places is not None and dims[n]:
            x = in_front(x, n)
    own = dims_in([every, call.kwargs])
    found = call.with_arguments({0: x, 1: [filled(i, 0) for i in every]})
    return _refilled(found.results(dims=own))


def _refilled(x: Any) -> Any:
    return filled(replace(x, fill=None), 0) if isinstance(x, Selected) else x


def _as_numbers(call: Call, indices: Sequence[Any]) -> list[Any]:
    """Indices with numbers instead of masks."""
    found: list[Any] = []
    known = {dim.key: dim.size for dim in dims_in([*indices])}
    for n, places in enumerate(indices):
        if not is_mask(places):
            found.append(places)
            continue
        own = _selection(call, places, 1 + n, None)
        size = known.get((own.name,)) or _unknown_size(call)
        found += _numbers(places, replace(own, size=size))
    return found


def _unknown_size(call: Call) -> Any:
    """The only size of a result that no operand has."""
    known = {dim.size for dim in dims_in((call.args, call.kwargs))}
    sizes = {call.sizes.of(n) for n in call.said.shape}
    new = [n for n in sizes if not isinstance(n, int) and n not in known]
    if len(new) != 1:
        raise call.refused(" and of indices")
    return new[0]


@RULES.row("index_put", "_unsafe_index_put")
def index_put(call: Call) -> Any:
    """x with rows replaced, or added to, where a mask is, or at indices."""
    x, indices, values = call.args[:3]
    accumulate = bool(call.argument(3, "accumulate", False))
    given = [n for n, i in enumerate(indices) if i is not None]
    first = indices[given[0]]
    if len(given) == 1 and is_mask(first):
        return call.results(_put_at(call, x, first, given[0], values, accumulate))
    if any(map(is_mask, indices)):
        raise call.refused(" and of indices")
    if is_over_rows(x, given):
        raise call.refused()
    where = tuple(slice(None) if i is None else i for i in indices)
    length = plain(x).shape[given[0]]
    numbers = [
        i if isinstance(i, slice) else plain(filled(_from_start(i, plain(x).shape[n]), length))
        for n, i in enumerate(where)
    ]  # outside, where no row is
    at = plain(x).at[tuple(numbers)]
    values = plain(values).astype(x.dtype)
    return call.results(at.add(values, mode="drop") if accumulate else at.set(values, mode="drop"))


def _from_start(places: Any, size: int) -> Any:
    return mapped(places, lambda n: jnp.where(n < 0, n + size, n))


def _put_at(call: Call, x: Any, mask: Any, axis: int, values: Any, accumulate: bool) -> Any:
    """x with `values` for the rows of a mask of some dims from `axis` on."""
    selection = _selection(call, mask, 1 + axis, None)
    array, rank = plain(x), mask.ndim
    after = array.ndim - axis - rank
    length = selection.live.shape[0]
    rows = array.reshape(*array.shape[:axis], length, *array.shape[axis + rank :])
    place = plain(values).ndim - after - 1  # of the rows in the values
    own = dim_at(values, place) if place >= 0 else None
    if own is not None and own.key != (selection.name,):
        values = in_front(values, place)
    given = plain(values)
    if place >= 0 and given.shape[place] != 1 and (own is None or own.key != (selection.name,)):
        given = read_in_order(given, selection.live, place)
    live = selection.live.reshape(-1, *[1] * after)
    made = jnp.where(live, (rows + given if accumulate else given).astype(array.dtype), rows)
    return made.reshape(array.shape)


@RULES.row("masked_scatter")
def masked_scatter(call: Call) -> Any:
    """x with the elements of rows, in order, where the mask is."""
    x, mask, source = call.args
    if isinstance(x, Selected) or isinstance(mask, Selected):
        raise call.refused()
    others = range(1, source.ndim)
    if is_over_rows(source, others):
        live = jnp.broadcast_to(source.live, source.shape).reshape(-1)
        pairs = zip(source.dims, source.shape, strict=True)
        size = math.prod(dim.size if dim else n for dim, n in pairs)
        elements = Selection("elements", size, live)
        source = Selected(source.array.reshape(-1), (Dim(size, (elements,)),), source.fill)
    return call.with_arguments({2: in_front(source, 0)}).results()
