"""`--enable-saturate-infinity`: infinities become the largest finite number ahead of transposes.

A NeuronCore-v2 transposes on the tensor engine by a product with the identity, where infinity times
zero gives NaN in every other element of the row. Operands of contractions and of explicit
transposes, and what a maximum or minimum is taken of, may pass that way, so they are clamped to the
finite range of their type; NaN stays NaN. Source: the option's entry of the neuronx-cc command-line
reference (needed on trn1 only).
"""

from __future__ import annotations

import numpy as np

from shardwright.compiler.dtypes import LARGEST
from shardwright.compiler.ir.build import constant_attrs
from shardwright.compiler.ir.combinations import EXTREMES
from shardwright.compiler.ir.facts import permutation
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.traits import CONTRACTIONS, REDUCTIONS
from shardwright.compiler.ir.types import Graph, Op, Value


def saturate_infinity(graph: Graph) -> Graph:
    """`graph` (loop-free) with finite operands in front of everything that may be transposed."""
    ops: list[Op] = []
    clamped: dict[Value, Value] = {}

    def finite(value: Value) -> Value:
        if value.type.dtype not in LARGEST:
            return value
        if value not in clamped:
            limit = LARGEST[value.type.dtype]
            low, high = (_limit(value, sign * limit, ops) for sign in (-1, 1))
            ops.append(make_op("clamp", (low, value, high)))
            clamped[value] = ops[-1].result
        return clamped[value]

    for op in graph.ops:
        operands = tuple(map(finite, op.operands)) if _may_transpose(op) else op.operands
        ops.append(with_operands(op, operands))
    return with_ops(graph, ops)


def _may_transpose(op: Op) -> bool:
    extreme = op.name in REDUCTIONS and op.attrs.kind in EXTREMES
    return extreme or op.name in CONTRACTIONS or permutation(op) is not None


def _limit(value: Value, number: float, ops: list[Op]) -> Value:
    array = np.broadcast_to(np.float32(number), value.type.shape)
    ops.append(make_op("constant", (), constant_attrs(array, value.type.dtype)))
    return ops[-1].result
