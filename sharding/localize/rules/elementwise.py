"""Elementwise ops pass every dim through: nothing changes but the types.

Scalar predicates and bounds (select, clamp) are the one exception to equal shapes. The user's
sharding constraints have done their work in partitioning and disappear here.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims

_NAMES = tuple(name for name, op in OPS.items() if op.elementwise and name != "sharding_constraint")


@localizes(*_NAMES)
def _elementwise(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.results[0])
    for operand in op.operands:
        if operand.type.rank == len(dims):
            require_dims(context, op, "operands and result", dims, context.dims(operand))
    return context.keep(op)


@localizes("move_to")
def _move(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.result)
    require_dims(context, op, "operand and result", dims, context.dims(op.operands[0]))
    return context.keep(op)


@localizes("sharding_constraint")
def _constraint(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.result)
    require_dims(context, op, "operand and result", dims, context.dims(op.operand))
    return context.operands(op)
