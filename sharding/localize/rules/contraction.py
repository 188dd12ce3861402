"""Ops that fold dims: kept dims carry their axes along, and a sharded dim that is folded leaves
partial results; the collective that joins them is in the partitioned graph already.

Convolutions are whole along space, since windows over a sharded dim would need the neighbours'
edges, and along what groups split.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import Localizer, localizes, require_dims, require_whole


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


@localizes("reduce")
def _reduce(context: Localizer, op: Op) -> Sequence[Value]:
    dims = context.dims(op.operands[0])
    kept = tuple(axes for d, axes in enumerate(dims) if d not in op.attrs.dims)
    require_dims(context, op, "kept dims and result", kept, context.dims(op.result))
    return context.keep(op)
