"""Which rank sends to which when a tensor changes the axes of its dims but not its shards.

A permute keeps every local shape: dims trade the axes they are split over, or their order. It may
assume that both layouts cut every dim into as many parts. The pairs are positions in the group over
the axes that move, as `collective_permute` takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.spec import ShardingSpec

Pairs = tuple[tuple[int, int], ...]


def ring_pairs(size: int) -> Pairs:
    """Every rank to the next one, the last to the first."""
    return tuple((rank, (rank + 1) % size) for rank in range(size))


def permute_pairs(
    mesh: Mesh, before: ShardingSpec, after: ShardingSpec
) -> tuple[tuple[str, ...], Pairs]:
    """The axes whose ranks trade shards, in mesh order, and (source, target) pairs.

    Ranks that hold copies before hand each copy to another rank that holds one after.
    """
    changed = [(a, b) for a, b in zip(before.dims, after.dims, strict=True) if a != b]
    axes = mesh.order([axis for pair in changed for side in pair for axis in side])
    sizes = {axis: mesh.sizes[axis] for axis in axes}
    left, right = (_by_shard(sizes, [pair[i] for pair in changed]) for i in (0, 1))
    return axes, tuple(sorted(zip(left, right, strict=True)))


def shard_pairs(mesh: Mesh, axes: Sequence[str], places: Sequence[int]) -> Pairs | None:
    """(source, target) pairs that put the slices at `places` of a dim over `axes` (major to minor)
    one behind the other; None where shards do not move as a whole. Pairs are positions in the group
    over the axes in mesh order.
    """
    count = mesh.size(axes)
    rows = np.asarray(places).reshape(count, -1)
    size = rows.shape[1]
    sources = rows[:, 0] // size
    if (rows != sources[:, None] * size + np.arange(size)).any():
        return None
    holders = _by_shard({axis: mesh.sizes[axis] for axis in mesh.order(axes)}, [axes])
    return tuple(sorted((holders[source], holders[n]) for n, source in enumerate(sources)))


def _by_shard(sizes: Mapping[str, int], dims: Sequence[Sequence[str]]) -> list[int]:
    """The ranks by which shard they hold, row-major, then by which copy of it."""
    order = [axis for dim in dims for axis in dim]
    order += [axis for axis in sizes if axis not in order]
    ranks = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    found: list[int] = ranks.transpose([[*sizes].index(axis) for axis in order]).ravel().tolist()
    return found
