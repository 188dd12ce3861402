"""The plan of a step in one call, as jobs make it in several."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.frontend.shardings import ModuleShardings
from shardwright.compiler.ir.types import Graph
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.partitioner import PartitionUnit, ask
from shardwright.sharding.plan import Plan, complete, partitioned, prepare
from shardwright.sharding.prepare.phantom_replica import MeanProof
from shardwright.sharding.settings import DEFAULTS, StrategySettings


def build_plan(
    graph: Graph,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    mesh: Mesh,
    *,
    settings: StrategySettings = DEFAULTS,
    num_microbatches: int = 1,
    unit: PartitionUnit = ask,
    user: ModuleShardings | None = None,
    proof: MeanProof | None = None,
) -> Plan:
    """Plan a step whose batch inputs hold one micro-batch of the whole mesh.

    `unit` runs the partition unit; by default a child process of this one. `user` is what the
    module of the step says about its distribution, `proof` that it may be traced with two samples
    where a micro-batch has one.
    """
    prepared = prepare(graph, inputs, outputs, mesh, settings, user, proof)
    return complete(prepared, partitioned(prepared, unit), num_microbatches)
