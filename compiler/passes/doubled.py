"""A value that is added twice is added once, and doubled with the sum.

Gradients of x * x add one product for either side. Scaling by a power of two is exact, and an
engine that scales as it reads does it for nothing, while each sum of two tensors takes Vector two
cycles an element. (a + y) + y is 2 (a / 2 + y), rounded once less. It overflows where the sum does,
which a + 2 y does not: with a = -y, 2 y may overflow on the way to a sum of y. Runs where CSE has
made equal values one.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import constant_attrs
from shardwright.compiler.ir.facts import signs
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import BroadcastInDimAttrs
from shardwright.compiler.ir.rewrite import replaced
from shardwright.compiler.ir.types import Graph, Op, Value

_TYPES = (DType.F32, DType.BF16)  # a half loses a bit below 1e-38; in fp16 that is below 6e-5
_PLUS = (1, 1)  # signs of a sum of two


def doubled(graph: Graph) -> Graph:
    """`graph` with those sums rewritten; what they leave unused is left to `dce`."""
    return replaced(graph, _doubled, doubled)


def _doubled(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
    """y + y, or the sum of y and a sum with y; nothing for any other op."""
    if signs(op) != _PLUS or op.result.type.dtype not in _TYPES:
        return []
    for total, y in (op.operands, op.operands[::-1]):
        made = producers.get(total)
        if total is y:
            return _scaled(y, 2.0, op)
        if made is not None and signs(made) == _PLUS and y in made.operands:
            rest = made.operands[1 - made.operands.index(y)]
            half = _scaled(rest, 0.5, op)
            once = make_op("add", (half[-1].result, y), loc=op.loc)
            return [*half, once, *_scaled(once.result, 2.0, op)]
    return []


def _scaled(y: Value, factor: float, op: Op) -> list[Op]:
    number = make_op("constant", (), constant_attrs(factor, y.type.dtype), loc=op.loc)
    wide = make_op(
        "broadcast_in_dim", (number.result,), BroadcastInDimAttrs((), y.type.shape), loc=op.loc
    )
    return [number, wide, make_op("multiply", (y, wide.result), loc=op.loc)]
