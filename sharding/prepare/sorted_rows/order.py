"""The order of ops once masks of segments read what a sort makes.

A mask may stand in front of the sort: as a comparison of places it needs the numbers of rows only.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.compiler.ir.topological import topological
from shardwright.compiler.ir.types import Graph, Op


def masks_behind(graph: Graph, sort_of: Mapping[Op, Op]) -> list[Op]:
    """The ops of a level in program order, but every mask behind its sort; what a sort and its mask
    need of each other is missing.
    """
    made = graph.producers()
    place = {op: i for i, op in enumerate(graph.ops)}
    before = {op: {made[v] for v in op.operands if v in made} for op in graph.ops}
    for mask, sort in sort_of.items():
        before[mask].add(sort)
    return topological(before, place.__getitem__)
