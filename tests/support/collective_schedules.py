"""Collectives counted move by move along their schedules: the oracle of the closed forms, and what
the busiest rank, link and EFA device carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.algorithms.tiers import tiers
from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.schedule import Schedule
from shardwright.collectives.timing.loads import Loads, schedule_loads
from shardwright.collectives.timing.times import _chunk_bytes, closed_time, loads_of, wires_ps


@lru_cache(maxsize=64)
def counted(choice: Choice, costs: CollectiveCosts) -> Loads:
    """Loads along the schedules of all groups."""
    return schedule_loads(choice, costs)


def flat(kind: CollectiveKind, name: str, orders: Sequence[Sequence[int]]) -> Schedule:
    """all_gather, reduce_scatter or all_reduce by the algorithm `name` over `orders` of all
    positions, one part of each chunk per order.
    """
    return tiers(kind, np.arange(len(orders[0])), (name,), orders, name)


def num_steps(schedule: Schedule) -> int:
    """Steps of all phases."""
    return sum(len(phase.starts) - 1 for phase in schedule.phases)


def num_moves(schedule: Schedule) -> int:
    """Moves of all phases."""
    return sum(len(phase.source) for phase in schedule.phases)


def rendered(schedule: Schedule) -> str:
    """Text form: one line per step."""
    lines = [
        f"{schedule.algorithm} {schedule.kind.value}: {schedule.num_ranks} ranks,"
        f" {schedule.parts} parts, {num_steps(schedule)} steps, {num_moves(schedule)} moves"
    ]
    for p in schedule.phases:
        lines.append(f"  {p.name} ({'reduce' if p.reduce else 'copy'}, {len(p.starts) - 1} steps)")
        for i, (first, end) in enumerate(pairwise(p.starts.tolist())):
            moves = zip(p.source[first:end], p.target[first:end], p.chunk[first:end], strict=True)
            lines.append(f"    {i}: " + " ".join(f"{s}>{t}:{c}" for s, t, c in moves))
    return "\n".join(lines)


schedule_time = partial(closed_time, counted=counted)
schedule_wires_ps = partial(wires_ps, counted=counted)


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes that the busiest rank receives, and that cross the busiest directed link and the
    busiest EFA device in one direction."""

    rank: int
    link: int
    efa: int


def carried(choice: Choice, size_bytes: int, element_bytes: int, costs: CollectiveCosts) -> Carried:
    """What a collective carries where it is busiest, phase after phase."""
    loads = loads_of(choice, costs)
    chunk = _chunk_bytes(loads, size_bytes, element_bytes)
    received = sum(
        max(c for c, _, _, _ in p.ranks) + max(r for _, r, _, _ in p.ranks) for p in loads.phases
    )
    link, efa = (
        sum(max((n for _, n in wires), default=0) for wires in kind)
        for kind in ([p.links for p in loads.phases], [p.efa for p in loads.phases])
    )
    return Carried(received * chunk, link * chunk, efa * chunk)
