"""What operations make of operands without elements: a value that is known, or an operand as it is.

Folding (`fold.py`) makes a constant of every value without elements; where a value with some is
made of one, it is told here. So none is left in a graph but its arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import BroadcastInDimAttrs, ConcatenateAttrs, ConstantAttrs
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.types import Op, Value


def of_nothing(op: Op) -> Op | Value | None:
    """The op or value that takes the place of `op`, which has elements, where an operand has none;
    None where every operand has some.
    """
    if len(op.results) != 1 or all(v.type.num_elements for v in op.operands):
        return None
    rule = _RULES.get(op.name)
    return rule(op) if rule else None


def _identity(op: Op) -> Op:
    """What a reduction starts from."""
    return _full(op, identity(op.attrs.kind, op.result.type.dtype))


def _zeros(op: Op) -> Op:
    """A sum of no products."""
    return _full(op, np.zeros((), op.result.type.dtype.numpy))


def _full(op: Op, element: np.ndarray) -> Op:
    return make_op("constant", (), ConstantAttrs.full(element, op.result.type), loc=op.loc)


def _others(op: Op) -> Op | Value:
    """The parts of a concatenation that have elements."""
    parts = [v for v in op.operands if v.type.num_elements]
    if len(parts) == 1:
        return parts[0]
    return make_op("concatenate", parts, ConcatenateAttrs(op.attrs.dim), loc=op.loc)


def _padding(op: Op) -> Op:
    """Padding all over."""
    attrs = BroadcastInDimAttrs((), op.result.type.shape)
    return make_op("broadcast_in_dim", op.operands[1:], attrs, loc=op.loc)


def _unchanged(op: Op) -> Value:
    """The operand that nothing is written to."""
    return op.operands[0]


_RULES: dict[str, Callable[[Op], Op | Value]] = {
    "concatenate": _others,
    "convolution": _zeros,
    "dot_general": _zeros,
    "dynamic_update_slice": _unchanged,
    "pad": _padding,
    "reduce": _identity,
    "reduce_window": _identity,
    "scatter": _unchanged,
}
