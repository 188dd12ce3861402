"""The time of a collective: choose the algorithm, then time it over all groups at once.

The entry for simulators and tools. Choices and reasons are in `select.py`, arithmetic in
`timing.py`, constants in `costs.py`; all groups of the collective run together and share links and
EFA devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.ops import CollectiveKind, ReplicaGroups
from shardwright.collectives.select import choose
from shardwright.collectives.timing import (
    PS_PER_S,
    CollectiveTime,
    closed_time,
    in_step,
    schedule_time,
    schedule_wires_ps,
    wires_ps,
)
from shardwright.collectives.topology import Topology

__all__ = [
    "CollectiveCosts",
    "CollectiveTime",
    "bus_bytes_per_s",
    "closed_time",
    "collective_time",
    "in_step",
    "schedule_time",
    "schedule_wires_ps",
    "wires_ps",
]


def collective_time(
    kind: CollectiveKind,
    topology: Topology,
    groups: ReplicaGroups,
    size_bytes: int,
    element_bytes: int,
    costs: CollectiveCosts,
    *,
    pairs: Sequence[tuple[int, int]] = (),
) -> CollectiveTime:
    """Time of `kind` running in all `groups` at once, in closed form.

    `size_bytes` is the larger of source and target of one rank; `pairs` are group positions, for
    collective_permute.
    Raises CollectiveError for sizes below one element and groups that do not fit the topology.
    """
    choice = choose(kind, topology, groups, size_bytes, element_bytes, costs, pairs=pairs)
    return closed_time(choice, size_bytes, element_bytes, costs)


def bus_bytes_per_s(kind: CollectiveKind, num_ranks: int, size_bytes: int, time_ps: int) -> float:
    """Bus bandwidth as the published tables print it.

    Source: documented: factor 2(r-1)/r for all_reduce, 1 for permutes, else (r-1)/r (nccom-test
    page).
    """
    factor = (num_ranks - 1) / num_ranks
    if kind is CollectiveKind.ALL_REDUCE:
        factor *= 2
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        factor = 1.0
    return size_bytes * factor * PS_PER_S / time_ps
