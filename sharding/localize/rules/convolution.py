"""`convolution`: batch and features carry their axes along, space is whole on every core.

Sharded input features leave partial sums; the collective that adds them is in the partitioned graph
already. Windows over a sharded spatial dim would need the neighbours' edges and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims, require_whole


@localizes("convolution")
def _convolution(context: Localizer, op: Op) -> Sequence[Value]:
    a = op.attrs
    lhs, rhs, out = (context.dims(v) for v in (*op.operands, op.result))
    for dims, numbers in ((lhs, a.lhs), (rhs, a.rhs), (out, a.out)):
        for d in numbers[2:]:
            require_whole(context, op, d, dims[d], "windows slide along it")
    if max(a.feature_groups, a.batch_groups) > 1:
        split = (lhs, a.lhs[1]) if a.feature_groups > 1 else (lhs, a.lhs[0])
        for dims, d in (split, (rhs, a.rhs[0]), (rhs, a.rhs[1]), (out, a.out[1])):
            require_whole(context, op, d, dims[d], "groups split it")
    inner, outer = (lhs[a.lhs[1]],), (rhs[a.rhs[1]],)
    require_dims(context, op, "input features", inner, outer)
    given = (lhs[a.lhs[0]], rhs[a.rhs[0]])
    require_dims(context, op, "operands and result", given, (out[a.out[0]], out[a.out[1]]))
    return context.keep(op)
