"""`[faults]`: what is wrong with the simulated cluster, from text to `sim_cluster.faults`.

Entries are separated by commas. Cores have numbers in the cluster (instance times cores per
instance, plus the core), links are an instance and two chips, EFA devices an instance and `efa`
with a number; ranges are written 32-63.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from collectives.topology import Topology
from compiler.diagnostics import UsageError
from orchestrator.config import FaultsConfig
from sim_cluster.degraded import degraded, pattern_of
from sim_cluster.faults import EFA, Faults, Link, check_faults

_CORES = re.compile(r"(\d+)(?:-(\d+))?")
_LINK = re.compile(r"(\d+)/(?:(\d+)-(\d+)|efa(\d+))")


def faults_of(given: FaultsConfig, topology: Topology) -> Faults:
    """The faults of a job on its cluster.

    Raises UsageError (SW_FAULT) for text that is not understood, and for cores, instances and links
    that are not there.
    """
    faults = Faults(
        slow_cores=dict(_slow_cores(given.slow_cores)),
        dead_cores=frozenset(c for text in _entries(given.dead_cores) for c in _dead_cores(text)),
        links=_links(given.slow_links),
        jitter=given.jitter,
        seed=given.seed,
    )
    check_faults(faults, topology.num_ranks, topology.num_instances)
    for links in faults.links.values():
        degraded(topology, pattern_of(links))
    return faults


def _entries(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _slow_cores(text: str) -> Iterator[tuple[int, float]]:
    wanted = "CORE:FACTOR or FIRST-LAST:FACTOR with factors of at least 1, as in 5:1.3"
    for entry in _entries(text):
        where, _, factor = entry.partition(":")
        times = _number(factor, 1.0, 1e6)
        cores = _cores(where)
        if times is None or cores is None:
            raise _refused("slow_cores", wanted, entry)
        yield from ((core, times) for core in cores)


def _dead_cores(entry: str) -> range:
    cores = _cores(entry)
    if cores is None:
        raise _refused("dead_cores", "core numbers or ranges, as in 17, 32-63", entry)
    return cores


def _cores(text: str) -> range | None:
    found = _CORES.fullmatch(text.strip())
    return range(int(found[1]), int(found[2] or found[1]) + 1) if found else None


def _links(text: str) -> dict[int, dict[Link, float]]:
    wanted = (
        "INSTANCE/CHIP-CHIP:PART or INSTANCE/efaDEVICE:PART, the part of the bandwidth that is left"
        " from 0 (dead) to 1, as in 0/3-7:0.5"
    )
    links: dict[int, dict[Link, float]] = {}
    for entry in _entries(text):
        where, _, part = entry.partition(":")
        found, left = _LINK.fullmatch(where.strip()), _number(part, 0.0, 1.0)
        if found is None or left is None:
            raise _refused("slow_links", wanted, entry)
        instance, first, second, device = found.groups()
        link: Link = (EFA, int(device)) if device else _chips(int(first), int(second))
        links.setdefault(int(instance), {})[link] = left
    return links


def _chips(first: int, second: int) -> tuple[int, int]:
    return min(first, second), max(first, second)


def _number(text: str, low: float, high: float) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if low <= number <= high else None


def _refused(key: str, wanted: str, entry: str) -> UsageError:
    return UsageError("SW_FAULT", f"faults.{key} requires {wanted}, got {entry!r}")
