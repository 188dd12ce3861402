"""Ops on which the rank's place tells: a constant or iota along a sharded dim needs its coordinate,
and a reshape is local exactly when every mesh axis keeps its distance in elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, check_factors, localizes


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


@localizes("sharding_constraint")
def _constraint(context: Localizer, op: Op) -> Sequence[Value]:
    """The user's constraint has done its work in partitioning."""
    check_factors(context, op)
    return context.operands(op)
