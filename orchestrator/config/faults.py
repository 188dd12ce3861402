"""`[faults]`: what is wrong with the simulated cluster, from text to `sim_cluster`.

Entries are separated by commas. Cores have numbers in the cluster (instance times cores per
instance, plus the core), links are an instance and two chips, EFA devices an instance and `efa`
with a number; ranges are written 32-63.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from shardwright.collectives.topology import Topology
from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.arguments import comma_words
from shardwright.orchestrator.config.config import FaultsConfig
from shardwright.sim_cluster.timing.degraded import degraded, pattern_of
from shardwright.sim_cluster.timing.faults import EFA, Faults, Link, check_faults, check_numbers
from shardwright.sim_cluster.timing.hardware import FAULT_CLASSES

T = TypeVar("T")
_CORES = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_LINK = re.compile(r"(\d{1,18})/(?:(\d{1,18})-(\d{1,18})|efa(\d{1,18}))")


def faults_of(given: FaultsConfig, topology: Topology) -> Faults:
    """The faults of a job on its cluster. Raises UsageError (SW_FAULT) for text that is not
    understood, for cores, instances and links that are not there, and for two factors of one core
    or link."""
    cores = topology.num_ranks
    faults = Faults(
        slow_cores=_slow_cores(given.slow_cores, cores),
        dead_cores=_dead_cores(given.dead_cores, cores),
        hardware=_hardware(given.hardware, cores),
        late_cores=_late_cores(given.late_cores, cores),
        links=_links(given.slow_links),
        jitter=given.jitter,
        seed=given.seed,
    )
    check_faults(faults, topology.num_ranks, topology.num_instances)
    for links in faults.links.values():
        degraded(topology, pattern_of(links))
    return faults


def _slow_cores(text: str, count: int) -> dict[int, float]:
    wanted = "CORE:FACTOR or FIRST-LAST:FACTOR with factors of at least 1, as in 5:1.3"
    return _by_core("slow_cores", text, count, lambda t: _number(t, 1.0, 1e6), wanted, "factor")


def _late_cores(text: str, count: int) -> dict[int, float]:
    wanted = "CORE:SECONDS or FIRST-LAST:SECONDS of at least 0, as in 5:300"
    return _by_core("late_cores", text, count, lambda t: _number(t, 0.0, 1e9), wanted, "time")


def _hardware(text: str, count: int) -> dict[int, str]:
    wanted = f"CORE:CLASS or FIRST-LAST:CLASS of {', '.join(FAULT_CLASSES)}, as in 5:hbm"
    known = {name: name for name in FAULT_CLASSES}
    return _by_core("hardware", text, count, known.get, wanted, "class")


def _by_core(
    key: str, text: str, count: int, read: Callable[[str], T | None], wanted: str, one: str
) -> dict[int, T]:
    """What every core has, of entries CORE:WORD."""
    found: dict[int, T] = {}
    for entry in comma_words(text):
        where, _, word = entry.partition(":")
        value, cores = read(word.strip()), _cores(key, where, count)
        if value is None or cores is None:
            raise _refused(key, wanted, entry)
        if any(core in found for core in cores):
            raise _refused(key, f"one {one} for every core", entry)
        found |= dict.fromkeys(cores, value)
    return found


def _dead_cores(text: str, count: int) -> frozenset[int]:
    dead: set[int] = set()
    for entry in comma_words(text):
        cores = _cores("dead_cores", entry, count)
        if cores is None:
            raise _refused("dead_cores", "core numbers or ranges, as in 17, 32-63", entry)
        dead |= set(cores)
    return frozenset(dead)


def _cores(key: str, text: str, count: int) -> range | None:
    """The cores of one entry, None for text that names none. They are held against the `count` of
    the cluster here: a range of a typing error may be too long to be written out."""
    found = _CORES.fullmatch(text.strip())
    cores = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if cores:
        check_numbers(key, (cores[0], cores[-1]), count, "core")
    return cores or None


def _links(text: str) -> dict[int, dict[Link, float]]:
    wanted = (
        "INSTANCE/CHIP-CHIP:PART or INSTANCE/efaDEVICE:PART, the part of the bandwidth that is left"
        " from 0 (dead) to 1, as in 0/3-7:0.5"
    )
    links: dict[int, dict[Link, float]] = {}
    for entry in comma_words(text):
        where, _, part = entry.partition(":")
        found, left = _LINK.fullmatch(where.strip()), _number(part, 0.0, 1.0)
        if found is None or left is None:
            raise _refused("slow_links", wanted, entry)
        instance, first, second, device = found.groups()
        low, high = sorted((int(first or 0), int(second or 0)))
        link: Link = (EFA, int(device)) if device else (low, high)
        of_instance = links.setdefault(int(instance), {})
        if link in of_instance:
            raise _refused("slow_links", "one part for every link and device", entry)
        of_instance[link] = left
    return links


def _number(text: str, low: float, high: float) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if low <= number <= high else None


def _refused(key: str, wanted: str, entry: str) -> UsageError:
    return UsageError("SW_FAULT", f"faults.{key} requires {wanted}, got {entry!r}")
