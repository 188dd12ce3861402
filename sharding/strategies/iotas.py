"""De-CSE of iotas: every reader has one of its own, so that equal iotas tie no indices.

Positions of a sequence and seats of an expert may be as many; after common subexpressions are one,
both are counted by one `iota`, and strategies would take them for one index of the model. An `iota`
is free, so every reader gets its own, with what only moves it on the way.
"""

from __future__ import annotations

from shardwright.compiler.ir.facts import counted_dim
from shardwright.compiler.ir.rewrite import with_operands, with_ops, with_regions
from shardwright.compiler.ir.traits import CASTS, VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value

MOVING = VIEWS | CASTS


def iota_de_cse(graph: Graph) -> Graph:
    """`graph` with one `iota` per reader, regions included; all other values stay."""
    made: dict[Value, Op] = {}
    taken: set[Value] = set()
    ops: list[Op] = []

    def own(value: Value) -> Value:
        """An `iota` nobody else reads."""
        if value not in made:
            return value
        if value not in taken:
            taken.add(value)
            return value
        op = made[value]
        result = Value(value.type)
        ops.append(Op(op.name, tuple(map(own, op.operands)), (result,), op.attrs, (), op.loc))
        return result

    for op in graph.ops:
        if counted_dim(op) is not None or (op.name in MOVING and op.operands[0] in made):
            made[op.result] = op
        op = with_regions(op, tuple(map(iota_de_cse, op.regions)))
        ops.append(with_operands(op, tuple(map(own, op.operands))))
    return with_ops(graph, ops)
