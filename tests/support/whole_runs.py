"""Run a partitioned graph on reference ranks, whole arrays in and out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.collectives.ops import ReplicaGroups, group_index
from shardwright.compiler.ir.reference import steps
from shardwright.compiler.ir.types import Value
from shardwright.sharding.cut.ring import with_context
from shardwright.sharding.localize import localize
from shardwright.sharding.partition.partitioned import PartitionedGraph
from tests.support.reference_ranks import run_collective


def run_whole(
    part: PartitionedGraph, inputs: Sequence[np.ndarray], context: str = "gather"
) -> list[np.ndarray]:
    """Outputs of `part` on whole inputs; every rank's shard of an output is checked against its
    copies.
    """
    local = localize(part)  # which `gather` leaves as it is: steps alone have slots
    graph = (local if context == "gather" else with_context(local, context)[0]).graph
    mesh = part.mesh
    ranks = range(mesh.num_cores)
    runs = [
        steps(
            graph, [_shard(part, v, a, r) for v, a in zip(part.graph.inputs, inputs, strict=True)]
        )
        for r in ranks
    ]
    sent: list = [None] * mesh.num_cores
    while True:
        asked, ended = [], []
        for run, results in zip(runs, sent, strict=True):
            try:
                asked.append(run.send(results))
            except StopIteration as stop:
                ended.append(stop.value)
        if ended:
            break
        sent = _answer(part, asked)
    shards = zip(*ended, strict=True)
    return [_join(part, v, s) for v, s in zip(part.graph.outputs, shards, strict=True)]


def _answer(part: PartitionedGraph, asked: Sequence) -> list:
    """What each rank gets for the op all of them wait at."""
    sizes = part.mesh.sizes
    op = asked[0][0]
    if op.name == "axis_index":
        return [
            (np.asarray(group_index(sizes, op.attrs.axes, r), np.int32),) for r in range(len(asked))
        ]
    results: list = [None] * len(asked)
    for group in ReplicaGroups.from_axes(sizes, op.attrs.axes).groups:
        shards = run_collective(op, [asked[r][1][0] for r in group])
        for rank, shard in zip(group, shards, strict=True):
            results[rank] = (shard,)
    return results


def _index(part: PartitionedGraph, value: Value, rank: int) -> tuple[slice, ...]:
    """Where `rank`'s shard of `value` lies in the whole."""
    spec, sizes = part.specs[value], part.mesh.sizes
    local = spec.local_shape(value.type.shape, sizes)
    starts = [group_index(sizes, axes, rank) for axes in spec.dims]
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(starts, local, strict=True))


def _shard(part: PartitionedGraph, value: Value, whole: np.ndarray, rank: int) -> np.ndarray:
    return np.array(whole[_index(part, value, rank)], order="C")


def _join(part: PartitionedGraph, value: Value, shards: Sequence[np.ndarray]) -> np.ndarray:
    whole = np.zeros(value.type.shape, value.type.dtype.numpy)
    for rank, shard in enumerate(shards):
        whole[_index(part, value, rank)] = shard
    for rank, shard in enumerate(shards):
        np.testing.assert_array_equal(whole[_index(part, value, rank)], shard)
    return whole
