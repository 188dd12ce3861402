"""`dot_general`: batch, free and contracting dims each carry their axes along.

A sharded contracting dim leaves partial sums; the collective that adds them is in the partitioned
graph already, so the local product needs nothing but matching axes.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims


@localizes("dot_general")
def _dot_general(context: Localizer, op: Op) -> Sequence[Value]:
    attrs = op.attrs
    lhs, rhs = (context.dims(v) for v in op.operands)
    for what, left, right in (
        ("batch dims", attrs.lhs_batch, attrs.rhs_batch),
        ("contracting dims", attrs.lhs_contract, attrs.rhs_contract),
    ):
        require_dims(context, op, what, tuple(lhs[d] for d in left), tuple(rhs[d] for d in right))
    lhs_free, rhs_free = attrs.free_dims(len(lhs), len(rhs))
    expected = tuple(lhs[d] for d in attrs.lhs_batch + lhs_free) + tuple(rhs[d] for d in rhs_free)
    require_dims(context, op, "operands and result", expected, context.dims(op.result))
    return context.keep(op)
