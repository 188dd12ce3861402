"""Order of regions: as in the program, except that collectives start early and are awaited late.

A collective starts as soon as its source is stored and is awaited right before the first region
that needs its result or the memory it uses; in between, other regions run.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.lower.body import Body
from compiler.lower.order import Order
from compiler.lower.task import COLLECTIVE, COPY


@dataclass(frozen=True, slots=True)
class Slot:
    """A step of the function: run region `region`, or wait for the collective that is region
    `region`.
    """

    region: int
    wait: bool = False


def schedule(body: Body, order: Order, members: Mapping[int, Sequence[int]]) -> list[Slot]:
    """Steps in order. `members` maps region -> task numbers; collectives are alone."""
    region_of = {n: r for r, numbers in members.items() for n in numbers}
    before = {
        r: _regions_before(body, order, numbers, region_of) - {r} for r, numbers in members.items()
    }
    slots: list[Slot] = []
    in_flight: list[int] = []
    for region in _sorted(body, before, members):
        for waited in [c for c in in_flight if c in before[region]]:
            slots.append(Slot(waited, wait=True))
            in_flight.remove(waited)
        slots.append(Slot(region))
        if body.tasks[region].kind == COLLECTIVE:
            in_flight.append(region)
    slots += [Slot(c, wait=True) for c in in_flight]
    return slots


def _regions_before(
    body: Body, order: Order, numbers: Sequence[int], region_of: Mapping[int, int]
) -> set[int]:
    return {region_of[n] for number in numbers for n in order.before(body.tasks[number])}


def _sorted(
    body: Body, before: Mapping[int, set[int]], members: Mapping[int, Sequence[int]]
) -> list[int]:
    """Regions in dependency order: ready collectives (and what feeds them) first, else the one that
    comes first in the program.
    """
    waiting = {r: len(b) for r, b in before.items()}
    after: dict[int, list[int]] = {r: [] for r in before}
    for region, earlier in before.items():
        for other in earlier:
            after[other].append(region)

    urgent = _urgent(body, after, members)

    def key(region: int) -> tuple[bool, int, int]:
        return (region not in urgent, max(members[region]), region)

    ready = [key(r) for r, count in waiting.items() if not count]
    heapq.heapify(ready)
    found: list[int] = []
    while ready:
        region = heapq.heappop(ready)[-1]
        found.append(region)
        for later in after[region]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, key(later))
    assert len(found) == len(before), "regions wait for each other"
    return found


def _urgent(
    body: Body, after: Mapping[int, Sequence[int]], members: Mapping[int, Sequence[int]]
) -> set[int]:
    """Collectives, and copies that only bring a source into place for them."""
    found = {r for r in members if body.tasks[r].kind == COLLECTIVE}
    copies = {
        r
        for r, numbers in members.items()
        if len(numbers) == 1 and body.tasks[r].op.name == COPY and set(after[r]) <= found
    }
    return found | copies
