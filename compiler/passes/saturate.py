"""`--enable-saturate-infinity`: infinities become the largest finite number ahead of what makes NaN
of them.

A NeuronCore-v2 transposes on the tensor engine by a product with the identity, where infinity times
zero gives NaN in every other element of the row. Operands of contractions and of explicit
transposes, and what a maximum or minimum is taken of, may pass that way. A sum of infinities of
both signs, their quotient, a product with zero and the angle functions give NaN wherever they are
computed. Operands of all these are clamped to the finite range of their type; NaN stays NaN.
Sources: the option's note in the release notes of neuronx-cc 2.7.0.40 (any operation), its entry of
the command-line reference (transposes; needed on trn1 only).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from shardwright.compiler.dtypes import LARGEST, DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.combinations import EXTREMES
from shardwright.compiler.ir.facts import combination, permutation
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.traits import CONTRACTIONS, REDUCTIONS, TRAFFIC
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type


def saturate_infinity(graph: Graph, before: str = "any") -> Graph:
    """`graph` (loop-free) with finite operands in front of everything that may be transposed, and
    of `any` other operation that makes NaN of infinities.
    """
    made = Builder()
    clamped: dict[Value, Value] = {}

    def finite(value: Value) -> Value:
        if value.type.dtype not in LARGEST:
            return value
        if value not in clamped:
            limit = np.float32(LARGEST[value.type.dtype])
            ends = (np.broadcast_to(end, value.type.shape) for end in (-limit, limit))
            low, high = (made.constant(end, value.type.dtype) for end in ends)
            clamped[value] = made.op("clamp", low, value, high)
        return clamped[value]

    for op in graph.ops:
        risky = _may_transpose(op) or (before == "any" and _makes_nan(op))
        operands = tuple(map(finite, op.operands)) if risky else op.operands
        made.append(with_operands(op, operands))
    return with_ops(graph, made.ops)


def _may_transpose(op: Op) -> bool:
    extreme = op.name in REDUCTIONS and op.attrs.kind in EXTREMES
    return extreme or op.name in CONTRACTIONS or permutation(op) is not None


def _makes_nan(op: Op) -> bool:
    """Whether an op makes NaN of infinities that its operands may have."""
    combines = combination(op) in ("add", "multiply") and op.name not in TRAFFIC
    return combines or _spoils(op.name, len(op.operands))


@cache
def _spoils(name: str, count: int) -> bool:
    """Whether an elementwise op of `count` floats gives NaN where an operand is infinite, and a
    number where the largest one is in its place.
    """
    if not OPS[name].elementwise or OPS[name].attrs is not None:
        return False
    given = [a.reshape(-1) for a in np.meshgrid(*[np.array(_ENDS, np.float32)] * count)]
    try:
        op = make_op(name, [Value(tensor_type(given[0].shape, DType.F32))] * count)
    except ValueError:  # it takes no floats
        return False
    largest = np.float32(LARGEST[DType.F32])
    (spoiled,) = OPS[name].reference(op, given)
    (kept,) = OPS[name].reference(op, [np.clip(a, -largest, largest) for a in given])
    return bool((np.isnan(spoiled) & ~np.isnan(kept)).any())


_ENDS = (-np.inf, -1.0, 0.0, 1.0, np.inf)
