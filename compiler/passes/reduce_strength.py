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
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import signs
from shardwright.compiler.ir.rewrite import replaced
from shardwright.compiler.ir.types import Graph, Op, Value

_TYPES = (DType.F32, DType.BF16)  # a half loses a bit below 1e-38; in fp16 that is below 6e-5
_PLUS = (1, 1)  # signs of a sum of two


def reduce_strength(graph: Graph) -> Graph:
    """`graph` with those sums rewritten; what they leave unused is left to `dce`."""
    return replaced(graph, _reduced, reduce_strength)


def _reduced(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
    """y + y, or the sum of y and a sum with y; nothing for any other op."""
    made = Builder(loc=op.loc)
    if signs(op) != _PLUS or op.result.type.dtype not in _TYPES:
        return made.ops
    for total, y in (op.operands, op.operands[::-1]):
        inner = producers.get(total)
        if total is y:
            _scaled(made, y, 2.0)
            break
        if inner is not None and signs(inner) == _PLUS and y in inner.operands:
            rest = inner.operands[1 - inner.operands.index(y)]
            _scaled(made, made.add(_scaled(made, rest, 0.5), y), 2.0)
            break
    return made.ops


def _scaled(made: Builder, y: Value, factor: float) -> Value:
    number = made.constant(factor, y.type.dtype)
    return made.multiply(y, made.broadcast(number, y.type.shape))
