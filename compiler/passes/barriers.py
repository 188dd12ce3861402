"""Drop barriers and user constraints from local graphs, where both have done their work, and moves
to memories where they are no transfers: a program of one file keeps all it has in HBM.

After this pass a recomputation is only kept apart by not being merged: no CSE may run behind it.
"""

from __future__ import annotations

from shardwright.compiler.ir.rewrite import Level, with_regions
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph

GIVEN_BACK = IDENTITIES | {"move_to"}


def drop_barriers(graph: Graph) -> Graph:
    """`graph` in which what read a barrier reads the barrier's operand."""
    return _without(graph, GIVEN_BACK)


def without_constraints(graph: Graph) -> Graph:
    """`graph` without sharding constraints; `graph` itself when it has none."""
    return _without(graph, frozenset(("sharding_constraint",)))


def _without(graph: Graph, names: frozenset[str]) -> Graph:
    level = Level()
    for op in graph.ops:
        op = level.update(op)
        if op.name in names:
            level.replace(op.results, op.operands)
        else:
            level.ops.append(with_regions(op, tuple(_without(r, names) for r in op.regions)))
    return level.finish(graph)
