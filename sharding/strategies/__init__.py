"""Strategies: recipes that say where every argument, result, activation and gradient lives.

A recipe reads a graph, the roles of its slots and a mesh, and returns the graph with constraints
plus specs by value id. It knows no partitioner: `sharding/partition/shardy.py` carries the specs
out, and `sharding/partition/findings.py` compares what came out with what the recipe predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.ir.types import Graph, TensorType, Value
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.spec import ShardingSpec

ValueId = tuple[int, int]
INPUT = -1
OUTPUT = -2


@dataclass(frozen=True, slots=True)
class Predicted:
    """A collective the recipe expects: kind, axes, and the global type of its result."""

    kind: str
    axes: tuple[str, ...]
    type: TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a strategy decided.

    `graph` carries constraints; `mesh` is the given one with axes cut where the strategy needs it.
    `specs` is keyed by (op ordinal, result index), (-1, input index) or (-2, output index);
    `reasons` says who decided what, by leaf name (and "layers"); `predicted` counts static
    collectives, loop bodies once, and is None where nothing is predicted. It is no measure of what
    comes out unless `follows_samples`: of a step of one sample the dim is left out by whatever
    drops a size of 1, and with it what depends on the sample. `tied` pairs the inputs and outputs
    that get the same layout when the partitioner chooses it.
    """

    graph: Graph
    mesh: Mesh
    specs: Mapping[ValueId, ShardingSpec]
    reasons: Mapping[str, str]
    predicted: Counter[Predicted] | None
    follows_samples: bool = True
    tied: tuple[tuple[int, int], ...] = ()
    findings: tuple[Diagnostic, ...] = ()

    @property
    def expected(self) -> Counter[Predicted] | None:
        """What the collectives of the partitioned graph are compared with, if anything."""
        return self.predicted if self.follows_samples else None


def value_ids(graph: Graph) -> Iterator[tuple[ValueId, Value]]:
    """Every input and op result with its id; region inputs share those of their loop."""
    for i, value in enumerate(graph.inputs):
        yield (INPUT, i), value
    for ordinal, op in enumerate(graph.walk()):
        for i, value in enumerate(op.results):
            yield (ordinal, i), value
