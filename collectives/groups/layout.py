"""How the groups of a collective lie on a topology.

A group is regular when it has the same local indices on each of its instances (documented
precondition of multi-node groups: inter-node collectives page). Groups that share instances run at
the same time and share links, so costs look at all groups of one set of instances together; sets
that look alike are looked at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.collectives.groups.cycles import chip_cycles
from shardwright.collectives.ops import CollectiveError, ReplicaGroups
from shardwright.collectives.topology import IntArray, Topology

Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Groups placed on a topology. Compared by identity; `place` returns one object per (topology,
    groups).

    Shapes: `ranks` [groups, size] in group order; `grid` [groups, instances, local indices] holds
    positions in the group, or is None when some group is irregular. `representatives` are the
    groups whose load stands for all.
    """

    topology: Topology
    ranks: IntArray
    grid: IntArray | None
    representatives: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Ranks per group."""
        return int(self.ranks.shape[1])

    @property
    def num_instances(self) -> int:
        """Instances a regular group spans; 0 when irregular."""
        return 0 if self.grid is None else int(self.grid.shape[1])

    @property
    def ranks_per_chip(self) -> int:
        """Ranks of a regular group on each chip it uses; 0 when chips differ or groups do."""
        if self.grid is None:
            return 0
        counts = set()
        for group in self.representatives:
            counts |= set(Counter(self.local_chips(group)).values())
        return counts.pop() if len(counts) == 1 else 0

    def local_chips(self, group: int) -> tuple[int, ...]:
        """Chip of each local index of a regular group."""
        assert self.grid is not None
        ranks = self.ranks[group, self.grid[group, 0]]
        return tuple(int(c) for c in self.topology.chip_of(ranks))


@lru_cache(maxsize=512)
def place(topology: Topology, groups: ReplicaGroups) -> Layout:
    """The layout of `groups`.

    Raises CollectiveError for groups of different sizes, a rank in two groups or outside the
    topology.
    """
    ranks = _rank_table(topology, groups)
    order = np.argsort(ranks, axis=1, kind="stable")
    ordered = np.take_along_axis(ranks, order, axis=1)
    instance, local = np.divmod(ordered, topology.ranks_per_instance)
    spans = 1 + (np.diff(instance, axis=1) > 0).sum(axis=1)
    if len(set(spans.tolist())) != 1 or ranks.shape[1] % int(spans[0]):
        return Layout(topology, ranks, None, tuple(range(len(ranks))))
    shape = (len(ranks), int(spans[0]), -1)
    instance, local = instance.reshape(shape), local.reshape(shape)
    regular = (instance == instance[:, :, :1]).all() and (local == local[:, :1]).all()
    regular = regular and _alike_on_chips(topology, local[:, 0])
    if not regular or not _instances_match(instance[:, :, 0]):
        return Layout(topology, ranks, None, tuple(range(len(ranks))))
    chosen = _representatives(instance[:, :, 0], local[:, 0])
    return Layout(topology, ranks, order.reshape(shape), chosen)


def _rank_table(topology: Topology, groups: ReplicaGroups) -> IntArray:
    sizes = sorted({len(group) for group in groups.groups})
    if len(sizes) != 1 or sizes[0] < 1:
        raise CollectiveError(f"replica groups require one size of at least 1, got {sizes}")
    ranks = np.array(groups.groups, dtype=np.int64)
    if len(np.unique(ranks)) != ranks.size:
        raise CollectiveError("replica groups require each rank at most once")
    if ranks.min() < 0 or ranks.max() >= topology.num_ranks:
        raise CollectiveError(
            f"replica groups require ranks below {topology.num_ranks}, got {int(ranks.max())}"
        )
    return ranks


def _alike_on_chips(topology: Topology, local: IntArray) -> bool:
    """True when all groups use the same number of chips, so that they have as many rings."""
    chips = np.sort(local // topology.ranks_per_chip, axis=1)
    used = 1 + (np.diff(chips, axis=1) > 0).sum(axis=1)
    return len(set(used.tolist())) == 1


def _instances_match(instances: IntArray) -> bool:
    """True when two groups have either the same instances or none in common."""
    sets = np.unique(instances, axis=0)
    return len(np.unique(sets)) == sets.size


def _representatives(instances: IntArray, local: IntArray) -> tuple[int, ...]:
    """Groups of one set of instances for each different collection of local indices."""
    members: dict[bytes, list[int]] = {}
    for group, key in enumerate(instances):
        members.setdefault(key.tobytes(), []).append(group)
    alike: dict[bytes, list[int]] = {}
    for found in members.values():
        found.sort(key=lambda g: local[g].tolist())
        alike.setdefault(local[found].tobytes(), found)
    return tuple(g for found in alike.values() for g in found)


@lru_cache(maxsize=1024)
def inside_rings(topology: Topology, chips: tuple[int, ...]) -> Orders:
    """Rings over local indices on `chips` (chip of each index): every cycle of the chips in both
    directions."""
    rings = []
    for cycle in chip_cycles(topology, tuple(sorted(set(chips)))):
        order = tuple(i for chip in cycle for i in on_chip(chips, chip))
        rings += [order] if len(order) < 3 else [order, order[::-1]]
    return tuple(rings)


@lru_cache(maxsize=1024)
def chip_order(topology: Topology, chips: tuple[int, ...]) -> tuple[int, ...]:
    """The different chips in the order of their corners of a hypercube: chips whose places differ
    in one bit are neighbours on sides of 2 and 4, and on a grid of those in every direction.

    Source: documented: a 2-D torus of 16 chips is a hypercube (intra-node collectives page).
    """

    def corner(chip: int) -> tuple[int, ...]:
        return tuple(_gray_rank(int(i)) for i in np.unravel_index(chip, topology.shape))

    return tuple(sorted(set(chips), key=corner))


def _gray_rank(place: int) -> int:
    """The number whose Gray code is `place`: 0, 1, 3, 2 for places 0, 1, 2, 3."""
    number = place
    while place := place >> 1:
        number ^= place
    return number


@lru_cache(maxsize=1024)
def is_hypercube(topology: Topology, chips: tuple[int, ...]) -> bool:
    """Whether recursive doubling over the chips crosses as many links everywhere in a step."""
    order = np.array(chip_order(topology, chips))
    if len(order) & (len(order) - 1):
        return False
    links = (topology.routes >= 0).sum(axis=2)
    places = np.arange(len(order))
    steps = [links[order, order[places ^ (1 << k)]] for k in range(len(order).bit_length() - 1)]
    return all(len(np.unique(step)) == 1 for step in steps)


@lru_cache(maxsize=1024)
def flat_rings(topology: Topology, chips: tuple[int, ...]) -> Orders:
    """Orders of the local indices between entering and leaving an instance, one channel per chip.

    Channels with an even number run the cycle forwards from their chip, odd ones backwards, so that
    every chip is entered once and left once and all EFA devices carry the same.
    Source: inferred; documented is one channel per EFA device (inter-node collectives page).
    """
    cycle = chip_cycles(topology, tuple(sorted(set(chips))))[0]
    rings = []
    for start in range(len(cycle)):
        turned = cycle[start:] + cycle[:start]
        if start % 2:
            turned = (turned[0], *reversed(turned[1:]))
        rings.append(tuple(i for chip in turned for i in on_chip(chips, chip)))
    return tuple(rings)


def on_chip(chips: Sequence[int], chip: int) -> list[int]:
    """The local indices on a chip; `chips` has the chip of each."""
    return [i for i, c in enumerate(chips) if c == chip]
