"""`reduce_window` and `select_and_scatter`: dims that no window spans carry their axes along.

Windows over a sharded dim would need the neighbours' edges and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims, require_whole


@localizes("reduce_window", "select_and_scatter")
def _windowed(context: Localizer, op: Op) -> Sequence[Value]:
    a, dims = op.attrs, context.dims(op.result)
    for operand in op.operands:
        require_dims(context, op, "operands and result", context.dims(operand), dims)
    for d, row in enumerate(zip(a.sizes, a.strides, a.low, a.high, strict=True)):
        if row != (1, 1, 0, 0):
            require_whole(context, op, d, dims[d], "windows slide along it")
    return context.keep(op)
