"""One op on the values of all layers at once: dim 0 of the operands counts layers.

Ops that work on each layer alone (updates of weights, casts, norms of leaves) become the op that a
model with stacked weights has. Operands that all layers share are repeated where the op needs
equal shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import pairing
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops import PadAttrs
from shardwright.compiler.ir.roles import is_stackable
from shardwright.compiler.ir.roles import stacked as stacked_attrs
from shardwright.compiler.ir.types import Op, TensorType, Value, tensor_type


def can_batch(op: Op) -> bool:
    """True for ops of which a stack is known."""
    return len(op.results) == 1 and (OPS[op.name].elementwise or is_stackable(op.attrs))


def fits(op: Op, stacked: Sequence[bool]) -> bool:
    """True when a stack of `op` takes these operands: layers pad with one value, and a contraction
    repeats nothing.
    """
    if isinstance(op.attrs, PadAttrs):
        return not stacked[1]
    return pairing(op) is None or all(stacked)


def stacked_type(type: TensorType, count: int) -> TensorType:
    """`count` values of `type` along a new first dim."""
    return tensor_type((count, *type.shape), type.dtype)


def batched(
    level: Builder, op: Op, operands: Sequence[Value], stacked: Sequence[bool], count: int
) -> Value:
    """The results of `op` for `count` layers; `stacked` says which operands have a dim for them."""
    if not OPS[op.name].elementwise:
        given = [
            v
            if is_stacked or (i and isinstance(op.attrs, PadAttrs))
            else _repeated(level, v, count)
            for i, (v, is_stacked) in enumerate(zip(operands, stacked, strict=True))
        ]
        (result,) = level.append(
            make_op(op.name, given, stacked_attrs(op.attrs, count), loc=op.loc)
        )
        return result
    free = _stays_scalar(op, stacked)
    given = []
    for old, value, is_stacked in zip(op.operands, operands, stacked, strict=True):
        if old.type.rank == 0 and op.result.type.rank > 0:
            given.append(value if free else _spread(level, value, op.result.type.shape, count))
        else:
            given.append(value if is_stacked else _repeated(level, value, count))
    (result,) = level.append(make_op(op.name, given, op.attrs, loc=op.loc))
    return result


def _stays_scalar(op: Op, stacked: Sequence[bool]) -> bool:
    """True when no layer has scalars of its own: what a predicate or bounds may be stays as it is.
    Where one bound is spread, so is the other.
    """
    pairs = zip(op.operands, stacked, strict=True)
    return not any(is_stacked and v.type.rank == 0 for v, is_stacked in pairs)


def _spread(level: Builder, value: Value, shape: Sequence[int], count: int) -> Value:
    """The scalar of each layer, or of all, in the place of every element of it."""
    return level.broadcast(value, (count, *shape), range(value.type.rank))


def _repeated(level: Builder, value: Value, count: int) -> Value:
    shape = value.type.shape
    return level.broadcast(value, (count, *shape), range(1, len(shape) + 1))
