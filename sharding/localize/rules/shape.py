"""Ops that make a shape: sharded dims must pass through whole.

A reshape is local exactly when every mesh axis keeps its distance in elements; a constant or iota
along a sharded dim needs the rank's coordinate.
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
