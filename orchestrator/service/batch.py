"""A batch of units on its way through the cache: what is stored, what this job computes, what
another job is computing now.

A unit is taken under its key's lock, without waiting. What another job holds is left to it and
looked up again, so jobs that share a cache share the work, and no job waits while it could compute
something else. The lock is given back as soon as the unit's result is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from shardwright.compiler.diagnostics import DiagnosticError, ExecutionError
from shardwright.orchestrator.cache import About, Cache
from shardwright.orchestrator.service.executor import Emit, Outcome, WorkUnit
from shardwright.orchestrator.service.unit_errors import (
    UnitDefectError,
    UnitFailedError,
    hinted,
    keep,
    refusal_kind,
    store_refusal,
    stored_refusal,
)


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit in the report: when it started (seconds after the job), how long, where, whether it
    was cached and since when (Unix time, 0 if not), and the code of the error it ended with."""

    kind: str
    key: str
    name: str
    started_s: float
    seconds: float
    worker: str
    cache: str  # hit or miss
    attempts: int = 1
    error: str = ""
    stored_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How far a batch is; `eta_s` is None until something was computed."""

    total: int
    done: int  # of whatever end: hits and failures too
    hits: int
    failed: int
    eta_s: float | None


Note = Callable[[UnitRow, Counts], None]
Left = Callable[[Sequence[WorkUnit]], None]
"""Told of the units that are left, when other jobs compute all of them."""


class Batch:
    """See the module; a `flight.Source`. `note` is told every row, with the counts after it, and
    `left` what only other jobs are still at; units of a kind that is `refused` are not computed."""

    def __init__(
        self,
        units: Iterable[WorkUnit],
        cache: Cache,
        emit: Emit,
        note: Note,
        epoch: float,
        left: Left | None = None,
        refused: Collection[str] = (),
    ) -> None:
        self._cache, self._emit, self._note, self._epoch = cache, emit, note, epoch
        self._left, self._is_left_told = left, False
        self._units = {unit.key: unit for unit in units}
        self._pending = dict(self._units)
        self._locks: dict[str, Callable[[], None]] = {}
        self._ask_again: dict[str, float] = {}  # when, of what another job holds
        self._begin = time.monotonic()
        self._computed_bytes, self._hits = 0, 0
        self.results: dict[str, bytes] = {}
        self.failures: dict[str, Exception] = {}
        absent = cache.bring((unit.kind, unit.key) for unit in self._units.values())
        cache.bring((refusal_kind(kind), key) for kind, key in absent)
        for unit in list(self._units.values()):
            self._look_up(unit, here=True)
        self._emit("batch.started", total=len(self._units), hits=self._hits)
        # Largest first: what is long must not start last. Equal ones by key, alike in every job.
        order = sorted(self._pending.values(), key=lambda u: (-len(u.payload), u.key))
        self._pending = {unit.key: unit for unit in order}
        self._refuse([unit for unit in order if unit.kind in refused])

    def __bool__(self) -> bool:
        """Whether there are units that are neither done nor taken."""
        return bool(self._pending)

    def take(self) -> WorkUnit | None:
        """The next unit of this job, None while another job has all that are left."""
        now = time.monotonic()
        for key, unit in list(self._pending.items()):
            if now < self._ask_again.get(key, 0.0):
                continue
            release = self._cache.claim(unit.kind, key)
            if release is None:
                if key not in self._ask_again:
                    self._tell("unit.waiting", unit)
                self._ask_again[key] = now + self._cache.poll_s
            elif self._look_up(unit):  # another job has stored it meanwhile
                release()
            else:
                self._locks[key] = release
                del self._pending[key]
                self._is_left_told = False
                self._tell("unit.started", unit, payload_bytes=len(unit.payload))
                return unit
        if self._left is not None and self._pending and not self._is_left_told:
            self._is_left_told = True
            self._left(list(self._pending.values()))
        return None

    def settle(self, outcome: Outcome) -> None:
        """Store what became of a unit, and give back its lock."""
        unit = outcome.unit
        if outcome.result is not None:
            about = About(unit.name, dict(unit.parts))
            self._cache.put(unit.kind, unit.key, outcome.result, about)
            self.results[unit.key] = outcome.result
        else:
            self._fail(unit, outcome)
        self._locks.pop(unit.key)()
        self._cache.tally.count(unit.kind, hit=False)
        self._computed_bytes += len(unit.payload)
        self._report(unit, outcome)

    def release(self) -> None:
        """Give back every lock and save the counts: the batch is over, or interrupted."""
        while self._locks:
            self._locks.popitem()[1]()
        self._cache.tally.save()

    def _look_up(self, unit: WorkUnit, here: bool = False) -> bool:
        """Whether the cache has the unit's result, or its refusal; `here` as in `Cache.get`."""
        entry = self._cache.find(unit.kind, unit.key, here)
        refusal = stored_refusal(self._cache, unit, here) if entry is None else None
        if entry is not None:
            self.results[unit.key], stored_s = entry.payload, entry.about.stored_s
        elif refusal is not None:
            self.failures[unit.key], stored_s = refusal, refusal.stored_s
        else:
            return False
        del self._pending[unit.key]
        self._hits += 1
        self._cache.tally.count(unit.kind, hit=True)
        code = refusal.error.code if refusal else ""
        now = time.time() - self._epoch
        stored_s = stored_s if stored_s < self._epoch else 0.0  # else this job has stored it
        row = UnitRow(
            unit.kind, unit.key, unit.name, now, 0.0, "cache", "hit", 1, code, stored_s=stored_s
        )
        self._tell("unit.hit", unit, code=code)
        self._note(row, self._counts())
        return True

    def _refuse(self, units: Sequence[WorkUnit]) -> None:
        """Settle units that are not to be computed: what a fatal miss is."""
        for unit in units:
            del self._pending[unit.key]
            error = ExecutionError(
                "SW_CACHE_MISS",
                f"cache.miss = refuse requires {unit.name} in the cache, which does not have it"
                f" ({len(units)} of {len(self._units)} units)",
                hint="compile first: shardwright run --compile-only; or set cache.miss = compile",
            )
            self.failures[unit.key] = UnitFailedError(unit, error)
            now = time.time() - self._epoch
            named = unit.kind, unit.key, unit.name
            self._note(UnitRow(*named, now, 0.0, "", "miss", 0, error.code), self._counts())
            self._tell("unit.failed", unit, code=error.code, message=error.diagnostic.message)

    def _fail(self, unit: WorkUnit, outcome: Outcome) -> None:
        error: DiagnosticError | None = outcome.error
        # What is refused needs no second run to be understood, and its payload no place on disk.
        again = error is None or isinstance(error, ExecutionError)
        command = keep(self._cache, unit) if again else ""
        if error is None:
            self.failures[unit.key] = UnitDefectError.of_unit(unit, outcome.defect, command)
        else:
            store_refusal(self._cache, unit, error)
            if command:
                error = hinted(error, f"reproduce with: {command}")
            self.failures[unit.key] = UnitFailedError(unit, error)
        self._tell(
            "unit.failed",
            unit,
            code=outcome.code,
            message=error.diagnostic.message if error else outcome.defect,
            reproduce=command,
            worker=outcome.worker,
            attempts=outcome.attempts,
        )

    def _report(self, unit: WorkUnit, outcome: Outcome) -> None:
        named, start = (unit.kind, unit.key, unit.name), outcome.started_s - self._epoch
        ended = outcome.attempts, outcome.code
        row = UnitRow(*named, start, outcome.seconds, outcome.worker, "miss", *ended)
        if outcome.result is not None:
            self._tell(
                "unit.done",
                unit,
                worker=row.worker,
                seconds=round(row.seconds, 6),
                attempts=row.attempts,
                result_bytes=len(outcome.result),
            )
        self._note(row, self._counts())

    def _tell(self, event: str, unit: WorkUnit, **fields: object) -> None:
        left = len(self._units) - len(self.results) - len(self.failures)
        self._emit(event, kind=unit.kind, key=unit.key, name=unit.name, left=left, **fields)

    def _counts(self) -> Counts:
        """Time left: bytes of payload that are left, at the pace of those that were computed."""
        ended = self.results.keys() | self.failures.keys()
        left = sum(len(u.payload) for key, u in self._units.items() if key not in ended)
        elapsed = time.monotonic() - self._begin
        eta = elapsed * left / self._computed_bytes if self._computed_bytes else None
        done, failed = len(ended), len(self.failures)
        return Counts(total=len(self._units), done=done, hits=self._hits, failed=failed, eta_s=eta)
