"""Drop barriers and user constraints from local graphs, where both have done their work.

After this pass a recomputation is only kept apart by not being merged: no CSE may run behind it.
"""

from __future__ import annotations

from compiler.ir.types import Graph
from compiler.passes.rewrite import Level, with_regions

IDENTITIES = frozenset(("optimization_barrier", "sharding_constraint"))


def drop_barriers(graph: Graph) -> Graph:
    """`graph` in which what read a barrier reads the barrier's operand."""
    level = Level()
    for op in graph.ops:
        op = level.update(op)
        if op.name in IDENTITIES:
            level.replace(op.results, op.operands)
        else:
            level.ops.append(with_regions(op, tuple(drop_barriers(r) for r in op.regions)))
    return level.finish(graph)
