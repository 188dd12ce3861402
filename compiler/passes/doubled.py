"""A value that is added twice is added once, times two.

Gradients of x * x add one product for either side. Doubling is exact, and an engine that scales as
it reads does it for nothing, while each sum of two tensors takes Vector two cycles an element. Of
(a + y) + y the sum is rounded once less. Runs where CSE has made equal values one.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.dtypes import DType
from compiler.ir.build import constant_attrs
from compiler.ir.opdef import make_op
from compiler.ir.ops import BroadcastInDimAttrs
from compiler.ir.types import Graph, Op, Value
from compiler.passes.rewrite import with_ops, with_regions

_TYPES = (DType.F32, DType.BF16)  # 2 y is as large as any sum: fp16 could overflow on the way


def doubled(graph: Graph) -> Graph:
    """`graph` with those sums rewritten; what they leave unused is left to `dce`."""
    producers: dict[Value, Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if op.regions:
            op = with_regions(op, tuple(doubled(region) for region in op.regions))
        for one in _doubled(op, producers) or [op]:
            ops.append(one)
            producers.update(dict.fromkeys(one.results, one))
    return with_ops(graph, ops)


def _doubled(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
    """y + y, or the sum of y and a sum with y; nothing for any other op."""
    if op.name != "add" or op.result.type.dtype not in _TYPES:
        return []
    for total, y in (op.operands, op.operands[::-1]):
        made = producers.get(total)
        if total is y:
            *twice, product = _twice(y, op)
            return [*twice, Op("multiply", product.operands, op.results, product.attrs, (), op.loc)]
        if made is not None and made.name == "add" and y in made.operands:
            rest = made.operands[1 - made.operands.index(y)]
            twice = _twice(y, op)
            return [*twice, Op("add", (rest, twice[-1].result), op.results, op.attrs, (), op.loc)]
    return []


def _twice(y: Value, op: Op) -> list[Op]:
    two = make_op("constant", (), constant_attrs(2.0, y.type.dtype), loc=op.loc)
    wide = make_op(
        "broadcast_in_dim", (two.result,), BroadcastInDimAttrs((), y.type.shape), loc=op.loc
    )
    return [two, wide, make_op("multiply", (y, wide.result), loc=op.loc)]
