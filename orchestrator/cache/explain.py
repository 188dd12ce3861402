"""`cache explain JOB`: which units of a job the cache has, and of those that it does not have,
which part of the key is not the one of the nearest entry.

Nothing is stored. A partition that is missing is made, because the units behind it are only known
then; behind units that compile code the road ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwright.orchestrator.cache.cache import Cache, open_cache
from shardwright.orchestrator.cache.entry import About, EntryName, read_about
from shardwright.orchestrator.config.config import JobConfig, from_store
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import time_programs
from shardwright.orchestrator.service.executor import InlineExecutor, WorkUnit, attempt
from shardwright.orchestrator.service.service import Settled, UnitService
from shardwright.orchestrator.service.unit_errors import (
    UnitDefectError,
    UnitFailedError,
    stored_refusal,
)
from shardwright.orchestrator.service.units import parts_digest

HIT, REFUSED, MISS = "hit", "refused", "miss"


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of a key: what it is for this job, and in the entry it is compared with."""

    part: str
    wanted: str
    stored: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A unit, what the cache has of it, and of a miss the nearest entry and how its key differs."""

    kind: str
    name: str
    key: str
    cache: str
    nearest: str = ""  # name of the entry
    nearest_key: str = ""
    differences: tuple[Difference, ...] = ()


def differences(wanted: Mapping[str, str], stored: Mapping[str, str]) -> tuple[Difference, ...]:
    """The parts that are not equal, by name."""
    return tuple(
        Difference(part, wanted.get(part, ""), stored.get(part, ""))
        for part in sorted(wanted.keys() | stored.keys())
        if wanted.get(part) != stored.get(part)
    )


class _EndError(Exception):
    """Which units come next is not known; the message says why."""


class Explainer(UnitService):
    """Looks units up instead of running them."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(InlineExecutor, cache)
        self.found: list[Explained] = []

    def settle(self, units: Sequence[WorkUnit]) -> Settled:
        """The stored results; missing partitions are made. Raises _EndError when results are
        missing that cannot be made quickly, or are stored refusals."""
        results: dict[str, bytes] = {}
        ends = ""
        for unit in {unit.key: unit for unit in units}.values():
            stored = self._cache.get(unit.kind, unit.key)
            refusal = stored_refusal(self._cache, unit) if stored is None else None
            state = HIT if stored is not None else REFUSED if refusal is not None else MISS
            named, parts = (unit.kind, unit.name, unit.key), dict(unit.parts)
            self.found.append(self.explained(*named, parts, state))
            if stored is not None:
                results[unit.key] = stored
            elif refusal is not None:
                ends = f"{unit.kind} unit {unit.name} is refused: {refusal.error.code}"
            elif unit.kind == "partition":
                results[unit.key] = _made(unit)
            else:
                ends = ends or f"units behind a {unit.kind} unit that is missing are not known"
        if ends:
            raise _EndError(ends)
        return Settled(results, {})

    @cached_property
    def _abouts(self) -> dict[str, list[tuple[EntryName, About]]]:
        """What the local directory knows about its entries, by kind."""
        found: dict[str, list[tuple[EntryName, About]]] = {}
        for item in self._cache.local.entries():
            try:
                about = read_about(self._cache.local.path(item.name))
            except OSError:
                continue
            if about is not None and about.parts:
                found.setdefault(item.name.kind, []).append((item.name, about))
        return found

    def explained(
        self, kind: str, name: str, key: str, parts: Mapping[str, str], state: str
    ) -> Explained:
        """A unit; a miss against the entry whose key differs in the fewest parts, of those the one
        of the same name."""
        plain = Explained(kind=kind, name=name, key=key, cache=state)
        rows = [
            (differences(parts, about.parts), about.name != name, entry, about)
            for entry, about in (self._abouts.get(kind, ()) if state == MISS else ())
        ]
        if not rows:
            return plain
        differing, _, entry, about = min(rows, key=lambda row: (len(row[0]), row[1], row[2].key))
        return replace(plain, nearest=about.name, nearest_key=entry.key, differences=differing)


def _made(unit: WorkUnit) -> bytes:
    outcome = attempt(unit, "explain")
    if outcome.error is not None:
        raise UnitFailedError(unit, outcome.error)
    if outcome.result is None:
        raise UnitDefectError.of_unit(unit, outcome.defect)
    return outcome.result


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the cache has of a job; `ends` says why units behind the last one are not known."""

    place: str
    units: list[Explained] = field(default_factory=list)
    ends: str = ""
    warnings: tuple[str, ...] = ()


def explain(job: JobConfig) -> Explanation:
    """What the cache has of a job. Raises the DiagnosticError of a stage that refuses it."""
    job = from_store(job)
    cache = open_cache(job.cache)
    service = Explainer(cache)
    ends = ""
    fixed = plan_cache.settled_before(job)
    try:
        if fixed is None:
            raise _EndError("the memory has not decided about this job yet: plan it")
        built = build(fixed, service, Stages())
    except _EndError as end:
        ends = str(end)
    else:
        with contextlib.suppress(_EndError):  # nothing comes after
            time_programs(built, built.programs, service, traced=True)
    plan = _plan(job, cache, service)
    place = ", ".join(store.place for store in cache.stores)
    return Explanation(place, [plan, *service.found], ends, tuple(cache.warnings))


def _plan(job: JobConfig, cache: Cache, explainer: Explainer) -> Explained:
    """The stored plan, which answers `shardwright plan` without any unit."""
    kind, name, parts = plan_cache.KIND, plan_cache.plan_name(job), plan_cache.plan_parts(job)
    key = parts_digest(kind, parts)
    state = MISS if cache.get(kind, key) is None else HIT
    return explainer.explained(kind, name, key, parts, state)
