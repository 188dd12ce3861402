"""Loops, and code of one rank. Carries keep their spec from operand to region input, region
output and result.

Regions do not capture, so a region is localized on its own; the rank's coordinate is an op inside
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.ops import ManualRegionAttrs
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims


@localizes("manual_region")
def _manual_region(context: Localizer, op: Op) -> Sequence[Value]:
    """The region's results, which are of one rank already."""
    types = tuple(map(context.local_type, op.results))
    whole = tuple(((),) * t.rank for t in types)
    attrs = ManualRegionAttrs(op.attrs.number, types, whole)
    return context.emit("manual_region", context.operands(op), attrs)


@localizes("loop")
def _loop(context: Localizer, op: Op) -> Sequence[Value]:
    (body,) = op.regions
    for what, values in (
        ("region inputs", body.inputs),
        ("region outputs", body.outputs),
        ("results", op.results),
    ):
        for operand, value in zip(op.operands, values, strict=True):
            require_dims(
                context, op, f"carries and {what}", context.dims(operand), context.dims(value)
            )
    return context.emit("loop", context.operands(op), op.attrs, (context.nested(body),))
