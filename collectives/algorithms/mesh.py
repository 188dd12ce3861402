"""Mesh algorithms: everyone to everyone in one logical step; few hops, but the links of a torus are
oversubscribed.

Source: documented: intra-node collectives page; runtime release notes name a chip-grouped variant
on trn1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.algorithms.lanes import Lanes, flat_lanes, phase
from collectives.ops import CollectiveKind
from collectives.schedule import Phase, Schedule
from collectives.topology import IntArray


def mesh(kind: CollectiveKind, order: Sequence[int]) -> Schedule:
    """all_gather, reduce_scatter or all_reduce of the positions in `order`, one step per phase."""
    lanes = flat_lanes([order])
    phases: list[Phase] = []
    if kind is not CollectiveKind.ALL_GATHER:
        phases.append(scatter_phase(lanes))
    if kind is not CollectiveKind.REDUCE_SCATTER:
        phases.append(gather_phase(lanes))
    return Schedule(kind, "mesh", lanes.members, 1, tuple(phases))


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
