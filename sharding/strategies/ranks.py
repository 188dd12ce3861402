"""How many data-parallel ranks share the state of a step, where the user leaves it open.

A weight is spread along one dim, so one that no dim divides stays whole: 4096 along 24 ranks, which
is 3 * 8. Replicas of fewer ranks then hold less.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.compiler.diagnostics import Diagnostic, ShardingError
from shardwright.compiler.frontend.roles import WEIGHT_ROLES
from shardwright.compiler.ir.types import Graph, Value
from shardwright.sharding.partition.mesh import SHARD_AXIS, Mesh, make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.prepare.rewrites import WITHOUT_CONSTRAINTS
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.decisions import Decisions
from shardwright.sharding.strategies.splits import split_layers
from shardwright.sharding.strategies.state import LARGE_REPLICATED_BYTES, spreadable


def mesh_for_state(
    graph: Graph,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    mesh: Mesh,
    settings: StrategySettings,
) -> tuple[Mesh, tuple[Diagnostic, ...]]:
    """`mesh`, or where its `dp_shard` leaves more weights whole than it spreads, the same ranks as
    replicas of fewer that share the state, and a note about it.
    """
    ranks = mesh.sizes.get(SHARD_AXIS, 1)
    if not settings.zero_stage or ranks == 1 or not _may_be_left(graph, inputs, mesh):
        return mesh, ()
    step = Decisions(WITHOUT_CONSTRAINTS(graph), inputs, outputs, mesh)
    try:
        step.read_graph()
        split_layers(step, settings)
    except ShardingError:  # the road of the plan refuses it too, after padding, and says why
        return mesh, ()
    weights = [(slot, value, tuple(local.values())) for slot, value, local in spreadable(step)]
    held = {n: _held(weights, n) for n in range(1, ranks + 1) if ranks % n == 0}
    shared = min(held, key=lambda n: (held[n], -n))
    if shared == ranks:
        return mesh, ()
    chosen = make_mesh(
        {**mesh.sizes, "dp_replicate": ranks // shared, SHARD_AXIS: shared},
    )
    whole = sum(not _divides(local, ranks) for _, _, local in weights)
    note = Diagnostic(
        "SW_MESH_CHOSEN",
        f"the mesh is {chosen}: no dim of {whole} of {len(weights)} weights divides by"
        f" {SHARD_AXIS}={ranks}, so that they would stay whole on every rank",
        hint=f"another one is asked for with --mesh, for example {mesh}",
        severity="note",
    )
    return chosen, (note,)


def _may_be_left(graph: Graph, inputs: Sequence[Slot], mesh: Mesh) -> bool:
    """Whether a large weight may have no dim that divides; the first of three or more counts its
    layers where they are stacked. To read the whole step is for these alone."""
    ranks = mesh.sizes[SHARD_AXIS]
    pairs = zip(inputs, graph.inputs, strict=True)
    shapes = [v.type for slot, v in pairs if slot.role in WEIGHT_ROLES]
    large = [t for t in shapes if t.num_bytes >= LARGE_REPLICATED_BYTES]
    return any(not _divides(t.shape[t.rank > 2 :], ranks) for t in large)


def _divides(sizes: Sequence[int], ranks: int) -> bool:
    return any(size % ranks == 0 for size in sizes)


def _held(weights: Sequence[tuple[Slot, Value, tuple[int, ...]]], ranks: int) -> float:
    """Elements that one of so many ranks holds of the weights, whatever it holds of each."""
    sizes = [(prod(value.type.shape), local) for _, value, local in weights]
    return sum(size / ranks if _divides(local, ranks) else size for size, local in sizes)
