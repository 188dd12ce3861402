"""Ops that move data: sharded dims must pass through whole, sizes in attributes become per-core
sizes.

A reshape is local exactly when every mesh axis keeps its distance in elements; a constant or iota
along a sharded dim needs the rank's coordinate. Slicing, padding or joining along a sharded dim
would need a halo and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims, require_whole


@localizes("constant")
def _constant(context: Localizer, op: Op) -> Sequence[Value]:
    attrs, local = op.attrs, context.local_type(op.result)
    if attrs.is_splat or local == attrs.type:
        return context.keep(op)
    whole = context.value("constant", (), attrs)
    return (context.take_shard(whole, context.dims(op.result), local),)


@localizes("iota")
def _iota(context: Localizer, op: Op) -> Sequence[Value]:
    dim, local = op.attrs.dim, context.local_type(op.result)
    (count,) = context.keep(op)
    axes = context.dims(op.result)[dim]
    if not axes:
        return (count,)
    start = context.offset(axes, local.shape[dim], local.dtype)
    return context.emit("add", (count, context.broadcast(start, local.shape)))


@localizes("broadcast_in_dim")
def _broadcast(context: Localizer, op: Op) -> Sequence[Value]:
    operand, result = context.dims(op.operand), context.dims(op.result)
    for i, d in enumerate(op.attrs.dims):
        if op.operand.type.shape[i] == op.attrs.shape[d]:
            require_dims(context, op, f"operand dim {i} and result dim {d}", operand[i], result[d])
        else:
            require_whole(context, op, i, operand[i], "it repeats")
    return context.keep(op)


def axis_strides_of(context: Localizer, value: Value) -> dict[str, int]:
    """Per axis, how many elements of the row-major global tensor lie between neighbouring cores."""
    strides: dict[str, int] = {}
    inner = 1
    for size, axes in zip(reversed(value.type.shape), reversed(context.dims(value)), strict=True):
        step = inner * (size // math.prod(context.mesh.sizes[a] for a in axes))
        for axis in reversed(axes):
            strides[axis] = step
            step *= context.mesh.sizes[axis]
        inner *= size
    return strides


@localizes("reshape")
def _reshape(context: Localizer, op: Op) -> Sequence[Value]:
    before, after = axis_strides_of(context, op.operand), axis_strides_of(context, op.result)
    if before != after:
        raise context.error(
            "SW_LOCALIZE_RESHAPE",
            f"reshape of {op.operand.type} {context.specs[op.operand]} to {op.result.type} "
            f"requires axes at the same distance in elements, got {before} and {after}",
            "shard the major dim of those that are merged or split",
        )
    return context.keep(op)


@localizes("transpose")
def _transpose(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.operand)
    moved = tuple(dims[d] for d in op.attrs.permutation)
    require_dims(context, op, "operand and result", moved, context.dims(op.result))
    return context.keep(op)


@localizes("slice")
def _slice(context: Localizer, op: Op) -> Sequence[Value]:
    attrs, operand = op.attrs, op.operand
    dims = context.dims(operand)
    require_dims(context, op, "operand and result", dims, context.dims(op.result))
    for d, axes in enumerate(dims):
        if (attrs.start[d], attrs.limit[d], attrs.stride[d]) != (0, operand.type.shape[d], 1):
            require_whole(context, op, d, axes, "it takes a part")
    return context.keep(op)


@localizes("concatenate")
def _concatenate(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.result)
    for operand in op.operands:
        require_dims(context, op, "operands and result", dims, context.dims(operand))
    require_whole(context, op, op.attrs.dim, dims[op.attrs.dim], "operands follow each other")
    return context.keep(op)


@localizes("pad")
def _pad(context: Localizer, op: Op) -> Sequence[Value]:
    attrs, dims = op.attrs, context.dims(op.result)
    require_dims(context, op, "operand and result", context.dims(op.operands[0]), dims)
    for d, axes in enumerate(dims):
        if attrs.low[d] or attrs.high[d] or attrs.interior[d]:
            require_whole(context, op, d, axes, "it is padded")
    return context.keep(op)


@localizes("reverse")
def _reverse(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.result)
    require_dims(context, op, "operand and result", context.dims(op.operand), dims)
    for d in op.attrs.dims:
        require_whole(context, op, d, dims[d], "it is reversed")
    return context.keep(op)


@localizes("dynamic_slice")
def _dynamic_slice(context: Localizer, op: Op) -> Sequence[Value]:
    operand = op.operands[0]
    dims = context.dims(operand)
    require_dims(context, op, "operand and result", dims, context.dims(op.result))
    for d, axes in enumerate(dims):
        if op.attrs.sizes[d] != operand.type.shape[d]:
            require_whole(context, op, d, axes, "it takes a part")
    return context.keep(op)


@localizes("dynamic_update_slice")
def _dynamic_update_slice(context: Localizer, op: Op) -> Sequence[Value]:
    operand, update = op.operands[:2]
    dims = context.dims(operand)
    require_dims(context, op, "operand and result", dims, context.dims(op.result))
    require_dims(context, op, "operand and update", dims, context.dims(update))
    for d, axes in enumerate(dims):
        if update.type.shape[d] != operand.type.shape[d]:
            require_whole(context, op, d, axes, "a part of it is replaced")
    return context.keep(op)
