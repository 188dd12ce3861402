"""`sort`: all dims but the sorted one carry their axes; the sorted one is whole on every core."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims, require_whole


@localizes("sort")
def _sort(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.operands[0])
    require_whole(context, op, op.attrs.dim, dims[op.attrs.dim], "it is sorted")
    for value in (*op.operands[1:], *op.results):
        require_dims(context, op, "operands and results", dims, context.dims(value))
    return context.keep(op)
