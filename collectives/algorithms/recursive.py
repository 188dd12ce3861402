"""Recursive halving and doubling: log2 N steps for N a power of two, minimal traffic.

Used across instances. Source: documented: inter-node since SDK 2.24 (runtime release notes,
inter-node collectives page).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.collectives.algorithms.lanes import Lanes, flat_lanes, phase
from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.schedule import Phase, Schedule
from shardwright.collectives.topology import IntArray


def recursive(kind: CollectiveKind, order: Sequence[int]) -> Schedule:
    """all_gather, reduce_scatter or all_reduce of the positions in `order`.

    Raises CollectiveError when their number is no power of two.
    """
    lanes = flat_lanes([order])
    phases: list[Phase] = []
    if kind is not CollectiveKind.ALL_GATHER:
        phases += scatter_phases(lanes)
    if kind is not CollectiveKind.REDUCE_SCATTER:
        phases += gather_phases(lanes)
    return Schedule(kind, "recursive", lanes.members, 1, tuple(phases))


def gather_phases(lanes: Lanes, name: str = "gather") -> list[Phase]:
    """Doubling: partners at distance 1, 2, 4, ... swap the aligned blocks they have so far. One
    phase per step."""
    phases = []
    for level in range(_levels(lanes.members)):
        source, target, owner = _swap(lanes.members, level, own_half=True)
        phases.append(phase(name, lanes, [(source, target, owner)], reduce=False))
    return phases


def scatter_phases(lanes: Lanes, name: str = "scatter") -> list[Phase]:
    """Halving: partners at distance N/2, ..., 2, 1 send each other the half the other one keeps."""
    phases = []
    for level in reversed(range(_levels(lanes.members))):
        source, target, owner = _swap(lanes.members, level, own_half=False)
        phases.append(phase(name, lanes, [(source, target, owner)], reduce=True))
    return phases


def _swap(members: int, level: int, *, own_half: bool) -> tuple[IntArray, IntArray, IntArray]:
    """Moves of all members with the partner at distance 2**level: the block of that size of either
    side."""
    block = 1 << level
    source = np.repeat(np.arange(members), block)
    target = source ^ block
    side = source if own_half else target
    owner = side // block * block + np.tile(np.arange(block), members)
    return source, target, owner


def _levels(members: int) -> int:
    if members & (members - 1):
        raise CollectiveError(
            f"recursive algorithms require a power of two of ranks, got {members}; use ring"
        )
    return members.bit_length() - 1
