"""What the user should know about a partitioned graph: every collective the recipe did not predict,
with file and line.

A surprise is not an error: values stay right. It is traffic nobody asked for, usually an op that
moves or loses the batch dim. Scalar sums (metrics, norms) are expected from any recipe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.ir.ops import AllToAllAttrs
from shardwright.compiler.ir.traits import TRAFFIC
from shardwright.compiler.ir.types import Graph, Op
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph
from shardwright.sharding.strategies import Predicted, Recipe

Key = tuple[str, tuple[str, ...], tuple[int, ...]]


def collectives(graph: Graph) -> Iterator[Op]:
    """Every op that moves data between cores, loop bodies once."""
    return (op for op in graph.walk() if op.name in TRAFFIC)


def with_findings(
    part: PartitionedGraph, recipe: Recipe, without: Sequence[str] = ()
) -> PartitionedGraph:
    """`part` with the recipe's findings and those of the comparison added; axes in `without` will
    be dropped.
    """
    expected = recipe.expected
    surprises = [] if expected is None else unexpected(part.graph, expected, part.mesh, without)
    return replace(part, findings=(*part.findings, *recipe.findings, *surprises))


def unexpected(
    graph: Graph, predicted: Mapping[Predicted, int], mesh: Mesh, without: Sequence[str] = ()
) -> list[Diagnostic]:
    """One finding per surprise that moves data over other axes than those of `without`."""
    found = [(op, set(op.attrs.axes) - set(without)) for op in surprises(graph, predicted)]
    return [
        Diagnostic(
            "SW_COLLECTIVE_UNEXPECTED",
            f"{op.name} over {mesh.shown(mesh.order([*axes]))} of {op.result.type}"
            f" ({op.result.type.num_bytes / 1e6:.3g} MB whole) was not predicted by the strategy",
            op.loc,
            hint="see what this line reduces, moves or merges: the sample dim, or a sharded weight"
            " dim",
            severity="warning",
        )
        for op, axes in found
        if axes
    ]


def surprises(graph: Graph, predicted: Mapping[Predicted, int]) -> list[Op]:
    """Every collective beyond the predicted number of its kind, axes and shape.

    An all_to_all may take the place of an all_gather: it moves a part where that moved everything.
    """
    left: Counter[Key] = Counter()
    for item, count in predicted.items():
        left[(item.kind, item.axes, item.type.shape)] += count
    found = []
    for op in collectives(graph):
        key = (op.name, op.attrs.axes, op.result.type.shape)
        if isinstance(op.attrs, AllToAllAttrs) and left[key] <= 0:
            key = ("all_gather", *key[1:])
        left[key] -= 1
        if left[key] < 0 and op.result.type.num_elements > 1:
            found.append(op)
    return found
