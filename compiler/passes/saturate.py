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
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.combinations import EXTREMES
from shardwright.compiler.ir.facts import permutation
from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.traits import CONTRACTIONS, REDUCTIONS
from shardwright.compiler.ir.types import Graph, Op, Value


def saturate_infinity(graph: Graph) -> Graph:
    """`graph` (loop-free) with finite operands in front of everything that may be transposed."""
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
        operands = tuple(map(finite, op.operands)) if _may_transpose(op) else op.operands
        made.append(with_operands(op, operands))
    return with_ops(graph, made.ops)


def _may_transpose(op: Op) -> bool:
    extreme = op.name in REDUCTIONS and op.attrs.kind in EXTREMES
    return extreme or op.name in CONTRACTIONS or permutation(op) is not None
