"""Global shapes to per-core shapes: `localize` turns a partitioned graph into the graph every core
runs.

Each value's type is divided by its spec; ops whose attributes or meaning change have a rule in
`rules/`, found by op name. Groups stay symbolic (mesh axes), so one graph serves every rank, and
the rank enters as `axis_index`. What comes out is cut by `cut/stages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compiler.ir.types import Graph, Value
from shardwright.sharding.localize.context import Localizer
from shardwright.sharding.localize.rules import (
    collective,
    contraction,
    control,
    gather,
    regular,
    shape,
)
from shardwright.sharding.partition.partitioned import PartitionedGraph

__all__ = [
    "Localized",
    "collective",
    "contraction",
    "control",
    "gather",
    "localize",
    "regular",
    "shape",
]


@dataclass(frozen=True, slots=True)
class Localized:
    """The per-core graph, the local value of every top-level global value, and its source."""

    graph: Graph
    values: Mapping[Value, Value]
    source: PartitionedGraph


def localize(partitioned: PartitionedGraph) -> Localized:
    """The graph of one core, the same on every rank.

    Shapes: each type is the global one divided by the axes of its spec; inputs and outputs keep
    their order.
    Raises: ShardingError with the op's location for a dim that does not divide, a sharding an op
    cannot keep local, or an op without a rule.
    """
    context = Localizer(partitioned.mesh, partitioned.specs)
    graph = context.region(partitioned.graph)
    return Localized(graph, context.env, partitioned)
