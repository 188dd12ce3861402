"""Mesh algorithms: everyone to everyone in one logical step; few hops, but the links of a torus are
oversubscribed.

Source: documented: intra-node collectives page; runtime release notes name a chip-grouped variant
on trn1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.collectives.algorithms.lanes import Lanes, flat_lanes, phase
from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.schedule import Phase, Schedule
from shardwright.collectives.topology import IntArray


def mesh(kind: CollectiveKind, order: Sequence[int]) -> Schedule:
    """all_gather, reduce_scatter or all_reduce of the positions in `order`, one step per phase."""
    lanes = flat_lanes([order])
    phases: list[Phase] = []
    if kind is not CollectiveKind.ALL_GATHER:
        phases.append(scatter_phase(lanes))
    if kind is not CollectiveKind.REDUCE_SCATTER:
        phases.append(gather_phase(lanes))
    return Schedule(kind, "mesh", lanes.members, 1, tuple(phases))


def single_step(order: Sequence[int]) -> Schedule:
    """all_reduce in one step: everyone sends its whole buffer to all others, who reduce it.

    Source: documented: intra- and inter-node collectives pages (one hop less than the mesh, N / 2
    times its payload).
    """
    lanes = flat_lanes([order])
    members = lanes.members
    source, target = (np.repeat(end, members) for end in all_pairs(members))
    owner = np.tile(np.arange(members), len(source) // members)
    reduce = phase("exchange", lanes, [(source, target, owner)], reduce=True)
    return Schedule(CollectiveKind.ALL_REDUCE, "single_step_mesh", members, 1, (reduce,))


def all_pairs(members: int) -> tuple[IntArray, IntArray]:
    """Every ordered pair of different members, nearest successors first."""
    i = np.tile(np.arange(members), max(0, members - 1))
    distance = np.repeat(np.arange(1, members), members)
    return i, (i + distance) % members


def gather_phase(lanes: Lanes, name: str = "gather") -> Phase:
    """Everyone sends its own chunk to all others."""
    source, target = all_pairs(lanes.members)
    return phase(name, lanes, [(source, target, source)], reduce=False)


def scatter_phase(lanes: Lanes, name: str = "scatter") -> Phase:
    """Everyone sends each owner its contribution; an owner adds its predecessors' in order of
    distance."""
    source, target = all_pairs(lanes.members)
    return phase(name, lanes, [(source, target, target)], reduce=True)
