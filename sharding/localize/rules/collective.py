"""Collectives get their real group size; groups of one core disappear; `all_slice` becomes a slice.

Shards lie in group order, row-major over the axes in mesh order. So the axes of a gather or scatter
must be in mesh order and must be the minor axes of the dim they move; anything else would permute
the data and is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Dims, Localizer, localizes, require_dims


def _group(context: Localizer, op: Op) -> tuple[str, ...]:
    """The axes of the group without axes of size 1, in mesh order. Raises ShardingError for another
    order.
    """
    sizes = context.mesh.sizes
    missing = [a for a in op.attrs.axes if a not in sizes]
    if missing:
        raise context.error(
            "SW_LOCALIZE_AXES", f"{op.name} requires axes of mesh {context.mesh}, got {missing}"
        )
    axes = tuple(a for a in op.attrs.axes if sizes[a] > 1)
    if axes != context.mesh.order(axes):
        raise context.error(
            "SW_LOCALIZE_ORDER",
            f"{op.name} requires axes in mesh order {context.mesh.names}, got {op.attrs.axes}",
        )
    return axes


def _add_minor(dims: Dims, dim: int, axes: tuple[str, ...]) -> Dims:
    """`dims` with `axes` below those that `dim` has already."""
    return (*dims[:dim], dims[dim] + axes, *dims[dim + 1 :])


def _moved(context: Localizer, op: Op, axes: tuple[str, ...]) -> Sequence[Value]:
    """The collective over the real group."""
    if not axes:
        return context.operands(op)
    size = context.mesh.size(axes)
    return context.keep(op, dataclasses.replace(op.attrs, axes=axes, group_size=size))


def _group_along(
    context: Localizer, op: Op, what: str, whole: Value, parts: Value
) -> tuple[str, ...]:
    """The axes of a group whose ranks hold, or get, parts of `whole` along the dim of `op`."""
    axes = _group(context, op)
    cut = _add_minor(context.dims(whole), op.attrs.dim, axes)
    require_dims(context, op, what, cut, context.dims(parts))
    return axes


@localizes("all_gather")
def _all_gather(context: Localizer, op: Op) -> Sequence[Value]:
    what = "the gathered dim and operand"
    return _moved(context, op, _group_along(context, op, what, op.result, op.operand))


@localizes("reduce_scatter")
def _reduce_scatter(context: Localizer, op: Op) -> Sequence[Value]:
    what = "the scattered dim and result"
    return _moved(context, op, _group_along(context, op, what, op.operand, op.result))


@localizes("all_reduce")
def _all_reduce(context: Localizer, op: Op) -> Sequence[Value]:
    operand, result = context.dims(op.operand), context.dims(op.result)
    require_dims(context, op, "operand and result", operand, result)
    return _moved(context, op, _group(context, op))


@localizes("all_to_all")
def _all_to_all(context: Localizer, op: Op) -> Sequence[Value]:
    axes, attrs = _group(context, op), op.attrs
    operand, result = context.dims(op.operand), context.dims(op.result)
    split = _add_minor(operand, attrs.split_dim, axes)
    concatenated = _add_minor(result, attrs.concat_dim, axes)
    require_dims(context, op, "split and concatenated dims", split, concatenated)
    return _moved(context, op, axes)


@localizes("collective_permute")
def _collective_permute(context: Localizer, op: Op) -> Sequence[Value]:
    operand, result = (context.local_type(v) for v in (op.operand, op.result))
    require_dims(context, op, "operand and result cut alike", operand.shape, result.shape)
    return _moved(context, op, _group(context, op))


@localizes("all_slice")
def _all_slice(context: Localizer, op: Op) -> Sequence[Value]:
    axes = _group_along(context, op, "the sliced dim and result", op.operand, op.result)
    (whole,) = context.operands(op)
    if not axes:
        return (whole,)
    new = tuple(axes if d == op.attrs.dim else () for d in range(op.result.type.rank))
    return (context.take_shard(whole, new, context.local_type(op.result)),)


@localizes("axis_index")
def _axis_index(context: Localizer, op: Op) -> Sequence[Value]:
    return (context.coordinate(op.attrs.axes),)
