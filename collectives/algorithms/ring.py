"""Ring algorithms: N - 1 steps, each rank passing one chunk per ring to its successor; minimal
traffic, any N.

Several rings carry a part of every chunk each, over different links. all_reduce is reduce_scatter
then all_gather.
Source: documented: intra- and inter-node collectives pages (ring on every target, flat ring on trn1
and trn1n).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.collectives.algorithms.lanes import Lanes, flat_lanes, phase
from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.schedule import Phase, Schedule


def ring(kind: CollectiveKind, rings: Sequence[Sequence[int]], algorithm: str = "ring") -> Schedule:
    """all_gather, reduce_scatter or all_reduce over `rings`: orders of all positions, one part of
    each chunk per ring."""
    lanes = flat_lanes(rings)
    phases: list[Phase] = []
    if kind is not CollectiveKind.ALL_GATHER:
        phases.append(scatter_phase(lanes))
    if kind is not CollectiveKind.REDUCE_SCATTER:
        phases.append(gather_phase(lanes))
    return Schedule(kind, algorithm, lanes.members, lanes.parts, tuple(phases))


def gather_phase(lanes: Lanes, name: str = "gather") -> Phase:
    """Step k: member i passes on what started at member i - k."""
    i = np.arange(lanes.members)
    after = (i + 1) % lanes.members
    steps = [(i, after, (i - k) % lanes.members) for k in range(lanes.members - 1)]
    return phase(name, lanes, steps, reduce=False)


def scatter_phase(lanes: Lanes, name: str = "scatter") -> Phase:
    """Step k: member i passes on the partial sum of member i - k - 1, which reaches its owner in
    the last step."""
    i = np.arange(lanes.members)
    after = (i + 1) % lanes.members
    steps = [(i, after, (i - k - 1) % lanes.members) for k in range(lanes.members - 1)]
    return phase(name, lanes, steps, reduce=True)
