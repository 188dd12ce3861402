"""`reduce`: kept dims carry their axes; a sharded dim that is folded leaves partial results.

The collective that joins the partial results is in the partitioned graph already.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims


@localizes("reduce")
def _reduce(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.operands[0])
    kept = tuple(axes for d, axes in enumerate(dims) if d not in op.attrs.dims)
    require_dims(context, op, "kept dims and result", kept, context.dims(op.result))
    return context.keep(op)
