"""Which rank sends to which when a tensor changes the axes of its dims but not its shards.

A permute keeps every local shape: dims trade the axes they are split over, or their order. It may
assume that both layouts cut every dim into as many parts. The pairs are positions in the group over
the axes that move, as `collective_permute` takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from shardwright.collectives.ops import axis_strides
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.spec import ShardingSpec

Coordinates = Mapping[str, int]
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
    strides = axis_strides(sizes)
    left, right = (_places(sizes, [pair[i] for pair in changed]) for i in (0, 1))
    where = {key: sum(strides[a] * at[a] for a in axes) for key, at in left}
    pairs = ((where[key], sum(strides[a] * at[a] for a in axes)) for key, at in right)
    return axes, tuple(sorted(pairs))


def _places(
    sizes: Mapping[str, int], dims: Sequence[Sequence[str]]
) -> Iterator[tuple[tuple[int, ...], Coordinates]]:
    """Every rank as (which shard it holds and which copy of it, coordinates)."""
    used = {axis for dim in dims for axis in dim}
    groups = [*dims, [axis for axis in sizes if axis not in used]]
    for position in product(*(range(size) for size in sizes.values())):
        at = dict(zip(sizes, position, strict=True))
        yield tuple(_index(sizes, group, at) for group in groups), at


def _index(sizes: Mapping[str, int], axes: Sequence[str], at: Coordinates) -> int:
    """Row-major position along `axes`."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index
