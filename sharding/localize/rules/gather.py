"""`gather` and `scatter`: windows and batch dims pass through; a sharded indexed dim becomes offset
and mask.

With the indexed dim sharded (an embedding split by vocabulary) every rank looks up the rows it
holds and gives zeros for the others: partial sums that a collective of the partitioned graph adds.
A scatter drops rows it does not hold, and when updates are spread over ranks, only the first rank
of the group adds them to the operand.

Which indices are wrong is told by the whole operand: where a rank holds a part, its op has the
indices of the whole beside its own. Of ranks with the same indices, one counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import moved, resized
from shardwright.compiler.ir.ops import (
    CompareAttrs,
    ConcatenateAttrs,
    GatherAttrs,
    ReshapeAttrs,
    ScatterAttrs,
    SliceAttrs,
    windows_of,
)
from shardwright.compiler.ir.ops.gather import last_starts
from shardwright.compiler.ir.types import Op, Value, tensor_type
from shardwright.sharding.localize.context import Localizer, localizes, require_dims, require_whole


def _check_indices(context: Localizer, op: Op) -> None:
    """Dims of the indices must be sharded like those of operand and moved tensor that walk them."""
    windows = windows_of(op.attrs)
    operand, indices, moving = (context.dims(v) for v in (*op.operands[:2], moved(op)))
    if windows.vector_dim < len(indices):
        why = "it holds the index vector"
        require_whole(context, op, windows.vector_dim, indices[windows.vector_dim], why)
    walked = tuple(axes for d, axes in enumerate(indices) if d != windows.vector_dim)
    given = tuple(axes for d, axes in enumerate(moving) if d not in windows.moving_dims)
    require_dims(context, op, "indices and batch dims", walked, given)
    left = tuple(operand[d] for d in windows.operand_batching)
    right = tuple(indices[d] for d in windows.indices_batching)
    require_dims(context, op, "batching dims", left, right)


def _check_disjoint(context: Localizer, op: Op, hit: Sequence[int]) -> None:
    """An axis that splits the rows must not split the indices: those rows would be missing."""
    operand, indices = (context.dims(v) for v in op.operands[:2])
    batching = windows_of(op.attrs).indices_batching
    rows = {axis for d in hit for axis in operand[d]}
    spread = {a for d, axes in enumerate(indices) if d not in batching for a in axes}
    if rows & spread:
        raise context.error(
            "SW_LOCALIZE_AXES",
            f"{op.name} requires rows and indices over different axes, got both over "
            f"{'+'.join(sorted(rows & spread))}",
            "gather the indices or the table first",
        )


def _components(context: Localizer, indices: Value, vector_dim: int) -> Iterator[Value]:
    """Every entry of all index vectors, keeping the vector dim."""
    shape = indices.type.shape
    if vector_dim == len(shape) or shape[vector_dim] == 1:
        yield indices
        return
    for k in range(shape[vector_dim]):
        start = tuple(k if d == vector_dim else 0 for d in range(len(shape)))
        limit = tuple(k + 1 if d == vector_dim else n for d, n in enumerate(shape))
        yield context.value("slice", (indices,), SliceAttrs(start, limit, (1,) * len(shape)))


def _shifted(context: Localizer, component: Value, axes: tuple[str, ...], local_size: int) -> Value:
    """Global row numbers as rows of this rank."""
    start = context.offset(axes, local_size, component.type.dtype)
    return context.value("subtract", (component, context.broadcast(start, component.type.shape)))


def _join(context: Localizer, components: Sequence[Value], vector_dim: int) -> Value:
    """Index vectors from their entries."""
    if len(components) == 1:
        return components[0]
    return context.value("concatenate", components, ConcatenateAttrs(vector_dim))


def _in_range(context: Localizer, rows: Value, size: int) -> Value:
    """True where 0 <= rows < size."""
    low, high = context.splat(0, rows.type), context.splat(size - 1, rows.type)
    above = context.value("compare", (rows, low), CompareAttrs("GE"))
    below = context.value("compare", (rows, high), CompareAttrs("LE"))
    return context.value("and", (above, below))


def _clamped(context: Localizer, component: Value, last: int) -> Value:
    """The row a gather of the whole operand would read: out-of-range indices go to the nearest."""
    scalar = tensor_type((), component.type.dtype)
    low, high = context.splat(0, scalar), context.splat(last, scalar)
    return context.value("clamp", (low, component, high))


@localizes("gather")
def _gather(context: Localizer, op: Op) -> Sequence[Value]:
    attrs: GatherAttrs = op.attrs
    operand = op.operands[0]
    dims, result = context.dims(operand), context.dims(op.result)
    _check_indices(context, op)
    kept = windows_of(op.attrs).window_dims(len(dims))
    sizes = attrs.slice_sizes
    for d, moving in zip(kept, attrs.offset_dims, strict=True):
        if sizes[d] == operand.type.shape[d]:
            require_dims(context, op, f"operand dim {d} and result", dims[d], result[moving])
        elif d not in attrs.start_index_map or sizes[d] != 1:
            require_whole(context, op, d, dims[d], "it takes a part")
    parts = [d for d, size in enumerate(sizes) if size < operand.type.shape[d]]
    hit = [d for d in attrs.start_index_map if dims[d] and d in parts]
    _check_disjoint(context, op, hit)
    attrs = replace(
        resized(op, context.local_type(op.result).shape), replicated=_replicated(context, op)
    )
    return _masked_gather(context, op, attrs, hit) if hit else context.keep(op, attrs)


def _replicated(context: Localizer, op: Op) -> tuple[str, ...]:
    """Mesh axes whose ranks all have the same indices; none for indices that are known, which were
    checked.
    """
    if context.is_known(op.operands[1]):
        return ()
    own = {axis for axes in context.dims(op.operands[1]) for axis in axes}
    return tuple(axis for axis, size in context.mesh.sizes.items() if size > 1 and axis not in own)


def _masked_gather(
    context: Localizer, op: Op, attrs: GatherAttrs, hit: Sequence[int]
) -> Sequence[Value]:
    """Look up the rows this rank holds, zero elsewhere."""
    operand, indices = context.operands(op)
    dims = context.dims(op.operands[0])
    components, masks = [], []
    entries = _components(context, indices, attrs.index_vector_dim)
    for d, rows, last in zip(attrs.start_index_map, entries, last_starts(op), strict=True):
        if d in hit:
            rows = _clamped(context, rows, last)
            rows = _shifted(context, rows, dims[d], operand.type.shape[d])
            masks.append(_in_range(context, rows, operand.type.shape[d]))
        components.append(rows)
    local = _join(context, components, attrs.index_vector_dim)
    operands: tuple[Value, ...] = (operand, local)
    if not context.is_known(op.operands[1]):
        operands = (*operands, indices)
        attrs = replace(attrs, last_starts=last_starts(op))
    found = context.value("gather", operands, attrs)
    mask = reduce(lambda one, other: context.value("and", (one, other)), masks)
    return (_keep_where(context, mask, found, attrs),)


def _keep_where(context: Localizer, mask: Value, found: Value, attrs: GatherAttrs) -> Value:
    """`found` where the index was in range, zero elsewhere."""
    batch = tuple(n for d, n in enumerate(mask.type.shape) if d != attrs.index_vector_dim)
    if batch != mask.type.shape:
        mask = context.value("reshape", (mask,), ReshapeAttrs(batch))
    where = tuple(d for d in range(found.type.rank) if d not in attrs.offset_dims)
    whole = context.broadcast(mask, found.type.shape, where)
    return context.value("select", (whole, found, context.splat(0, found.type)))


@localizes("scatter")
def _scatter(context: Localizer, op: Op) -> Sequence[Value]:
    attrs: ScatterAttrs = op.attrs
    operand, _, updates = op.operands
    dims, moving = context.dims(operand), context.dims(updates)
    require_dims(context, op, "operand and result", dims, context.dims(op.result))
    _check_indices(context, op)
    kept = windows_of(op.attrs).window_dims(len(dims))
    for d, m in zip(kept, attrs.update_window_dims, strict=True):
        if updates.type.shape[m] == operand.type.shape[d]:
            require_dims(context, op, f"operand dim {d} and updates", dims[d], moving[m])
        else:
            require_whole(context, op, d, dims[d], "a part of it is updated")
    hit = [
        d for d in attrs.scatter_dims_to_operand_dims if dims[d] and d in attrs.inserted_window_dims
    ]
    _check_disjoint(context, op, hit)
    whole = _counted_once(context, op, _spread_axes(context, op))
    operands: tuple[Value, ...] = (whole, _local_rows(context, op, hit), context.env[updates])
    attrs = replace(attrs, replicated=_replicated(context, op))
    if hit and not context.is_known(op.operands[1]):
        operands = (*operands, context.env[op.operands[1]])
        attrs = replace(attrs, last_starts=last_starts(op))
    return context.emit("scatter", operands, attrs)


def _spread_axes(context: Localizer, op: Op) -> tuple[str, ...]:
    """Axes over which the updates, but not the operand, are sharded: the result is a partial sum
    over them.
    """
    own = {a for axes in context.dims(op.operands[0]) for a in axes}
    spread = {a for axes in context.dims(op.operands[2]) for a in axes} - own
    return context.mesh.order(tuple(spread))


def _counted_once(context: Localizer, op: Op, spread: tuple[str, ...]) -> Value:
    """The operand, zero on all ranks but the first of a group whose partial sums get added."""
    operand = context.env[op.operands[0]]
    if not spread:
        return operand
    if op.attrs.kind != "add":
        raise context.error(
            "SW_LOCALIZE_SCATTER",
            f"scatter of kind {op.attrs.kind} requires updates on one rank, got them over {spread}",
            "gather the updates first",
        )
    zero = context.splat(0, tensor_type((), DType.I32))
    first = context.value("compare", (context.coordinate(spread), zero), CompareAttrs("EQ"))
    return context.value("select", (first, operand, context.splat(0, operand.type)))


def _local_rows(context: Localizer, op: Op, hit: Sequence[int]) -> Value:
    """Index vectors with sharded entries shifted to this rank; what falls outside is dropped by the
    scatter.
    """
    indices = context.env[op.operands[1]]
    if not hit:
        return indices
    attrs, dims = op.attrs, context.dims(op.operands[0])
    local = context.env[op.operands[0]].type.shape
    entries = _components(context, indices, attrs.index_vector_dim)
    components = []
    ends = last_starts(op)
    for d, rows, last in zip(attrs.scatter_dims_to_operand_dims, entries, ends, strict=True):
        if d in hit:
            if attrs.last_starts:  # what is in the padding is nobody's row
                inside = _in_range(context, rows, last + 1)
                rows = context.value("select", (inside, rows, context.splat(-1, rows.type)))
            rows = _shifted(context, rows, dims[d], local[d])
        components.append(rows)
    return _join(context, components, attrs.index_vector_dim)
