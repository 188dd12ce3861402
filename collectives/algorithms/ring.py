"""Ring algorithms: N - 1 steps, each rank passing one chunk per ring to its successor; minimal
traffic, any N.

Several rings carry a part of every chunk each, over different links. all_reduce is reduce_scatter
then all_gather.
Source: documented: intra- and inter-node collectives pages (ring on every target, flat ring on trn1
and trn1n).
"""

from __future__ import annotations

import numpy as np

from shardwright.collectives.algorithms import recursive
from shardwright.collectives.algorithms.algorithm import Algorithm, Asked, Steps
from shardwright.collectives.groups.layout import Layout, Orders, flat_rings, inside_rings


def _gather(members: int) -> list[Steps]:
    """Step k: member i passes on what started at member i - k."""
    member = np.arange(members)
    return [Steps(member, np.roll(member, -1)[None], member[:, None], times=members - 1)]


def _inside(asked: Asked) -> str:
    layout = asked.layout
    chips = layout.local_chips(layout.representatives[0])
    lone = "one rank per chip, " if layout.ranks_per_chip == 1 else ""
    rings = len(inside_rings(layout.topology, chips))
    over = f"{asked.size_bytes} B > mesh_max_bytes {asked.costs.mesh_max_bytes}"
    return f"{over}; {lone}rings {rings}, chips {len(set(chips))}"


def _across(asked: Asked) -> bool:
    return not recursive.across(asked)


def _whole(asked: Asked) -> str:
    least, size, layout = asked.costs.flat_ring_min_bytes, asked.size_bytes, asked.layout
    fits = least and size >= least and 1 < layout.num_instances < layout.group_size
    return f"{size} B >= flat_ring_min_bytes {least}" if fits else ""


def _flat(layout: Layout, group: int) -> Orders:
    """One order of all positions per channel, instance after instance."""
    assert layout.grid is not None
    rows = layout.grid[group].tolist()
    orders = flat_rings(layout.topology, layout.local_chips(group))
    return tuple(tuple(row[i] for row in rows for i in order) for order in orders)


RING = Algorithm(name="ring", gather=_gather, cycles=True, inside=_inside, across=_across)
FLAT_RING = Algorithm(name="flat_ring", sides=(RING,), orders=_flat, whole=_whole)
