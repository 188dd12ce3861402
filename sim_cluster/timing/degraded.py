"""Collectives on instances whose links or EFA devices are slow or dead.

Phases of a collective run in step, so it is as slow as its slowest link: one on a single instance
costs what it would cost if every instance had it. So a collective that touches faulty instances is
priced, phase by phase, on topologies that have the faults of one of them everywhere
(`network.py`), one that does not on the healthy one. Moves go around dead links on the shortest
path that is left, and to the next EFA device (inferred: what a runtime does then is not
documented).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwright.collectives.topology import IntArray, Topology
from shardwright.compiler.diagnostics import UsageError
from shardwright.sim_cluster.timing.faults import EFA, Link

Pattern = tuple[tuple[Link, float], ...]
"""Faulty links of an instance with what is left of their bandwidth, sorted; empty: none."""


def pattern_of(links: Mapping[Link, float]) -> Pattern:
    """The pattern of an instance."""
    return tuple(sorted(links.items(), key=str))


@lru_cache(maxsize=64)
def degraded(topology: Topology, pattern: Pattern) -> Topology:
    """`topology` with the faults of a pattern on every instance.

    Raises UsageError (SW_FAULT) for a link or device the machine does not have, or when nothing
    leads around a dead one.
    """
    if not pattern:
        return topology
    rates, dead = topology.bytes_per_s.copy(), set()
    for link, left in pattern:
        for number in _numbers(topology, link):
            rates[number] = max(1, round(rates[number] * left))
            dead |= {number} if left == 0 else set()
    return replace(
        topology,
        bytes_per_s=rates,
        routes=_around(topology, dead),
        efa_out=_next_device(topology.efa_out, dead),
        efa_in=_next_device(topology.efa_in, dead),
    )


def _numbers(topology: Topology, link: Link) -> list[int]:
    """Both directions of a link or device."""
    first, second = link
    if first == EFA:
        ways = [sorted(set(d.tolist()) - {-1}) for d in (topology.efa_out, topology.efa_in)]
        if int(second) >= len(ways[0]):
            raise _unknown(f"an EFA device below {len(ways[0])}", f"{EFA}{second}")
        return [devices[int(second)] for devices in ways]
    ends = zip(topology.link_source.tolist(), topology.link_target.tolist(), strict=True)
    found = [n for n, (a, b) in enumerate(ends) if (a, b) in ((first, second), (second, first))]
    if not found:
        raise _unknown("two chips that a link joins", f"{first}-{second}")
    return found


def _unknown(required: str, given: str) -> UsageError:
    return UsageError(
        "SW_FAULT",
        f"faults.slow_links requires {required}, got {given}",
        None,
        "links join neighbouring chips of the torus: chip = 4 x row + column on trn1",
    )


def _around(topology: Topology, dead: set[int]) -> IntArray:
    """Routes that cross no dead link; the others stay as they are."""
    broken = np.isin(topology.routes, sorted(dead)).any(axis=2)
    if not broken.any():
        return topology.routes
    leaving: dict[int, list[tuple[int, int]]] = {}
    for number in np.flatnonzero(~topology.is_efa).tolist():
        if number not in dead:
            source, target = topology.link_source[number], topology.link_target[number]
            leaving.setdefault(int(source), []).append((number, int(target)))
    paths = {(a, b): _path(a, b, leaving) for a, b in np.argwhere(broken).tolist()}
    longest = max(topology.routes.shape[2], *(len(path) for path in paths.values()))
    routes = np.full((*broken.shape, longest), -1, dtype=np.int64)
    routes[:, :, : topology.routes.shape[2]] = topology.routes
    for (a, b), path in paths.items():
        routes[a, b] = [*path, *[-1] * (longest - len(path))]
    return routes


def _path(start: int, end: int, leaving: Mapping[int, Sequence[tuple[int, int]]]) -> list[int]:
    """Links of the shortest path between two chips."""
    paths: dict[int, list[int]] = {start: []}
    waiting = deque([start])
    while waiting and end not in paths:
        chip = waiting.popleft()
        for number, target in leaving.get(chip, ()):
            if target not in paths:
                paths[target] = [*paths[chip], number]
                waiting.append(target)
    if end not in paths:
        raise UsageError(
            "SW_FAULT",
            f"faults require a way between chips {start} and {end}, got none: all are dead",
            None,
            "leave the instance out, cluster.instances",
        )
    return paths[end]


def _next_device(devices: IntArray, dead: set[int]) -> IntArray:
    """For every chip, the EFA device it uses: the next one in number when its own is dead."""
    alive = [d for d in sorted(set(devices.tolist())) if d not in dead]
    if len(alive) == len(set(devices.tolist())):
        return devices
    if not alive:
        raise UsageError("SW_FAULT", "faults require an EFA device that is left, got none")
    later = [min((a for a in alive if a >= d), default=alive[0]) for d in devices.tolist()]
    return np.array(later, dtype=np.int64)
