"""Units through the cache: each distinct unit is computed once, whoever asks, and every unit leaves
a row for the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.diagnostics import Diagnostic, DiagnosticError
from orchestrator.cache import Cache
from orchestrator.executor import Executor, Outcome, WorkUnit


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit in the report: when it started (seconds after the job), how long, where, and whether
    it was cached."""

    kind: str
    key: str
    name: str
    started_s: float
    seconds: float
    worker: str
    cache: str  # hit or miss
    attempts: int = 1


class UnitFailedError(Exception):
    """A unit was refused; `error` says why. Compile units know op ordinals, their caller the
    lines.
    """

    def __init__(self, unit: WorkUnit, error: DiagnosticError) -> None:
        super().__init__(unit.name, error)
        self.unit = unit
        self.error = error


class UnitService:
    """Runs units of a job on one executor through one cache."""

    def __init__(
        self,
        executor: Callable[[], Executor],
        cache: Cache,
        progress: Callable[[UnitRow, int, int], None] | None = None,
    ) -> None:
        self._make_executor = executor
        self._executor: Executor | None = None
        self._cache = cache
        self._progress = progress
        self._epoch = time.time()
        self._done = 0  # of the current call of run
        self.rows: list[UnitRow] = []

    def run(self, units: Sequence[WorkUnit]) -> dict[str, bytes]:
        """Results by key.

        Raises UnitFailedError with the first diagnosed error, after the other units are stored.
        """
        distinct = {unit.key: unit for unit in units}
        total, self._done = len(distinct), 0
        results = {}
        for key, unit in distinct.items():
            if (payload := self._cache.get(unit.kind, key)) is not None:
                results[key] = payload
                self._note(_hit(unit, self._now()), total)
        missing = [unit for key, unit in sorted(distinct.items()) if key not in results]
        if missing:
            results.update(self._compute(missing, total))
        return results

    def _compute(self, units: Sequence[WorkUnit], total: int) -> dict[str, bytes]:
        """Compute under the keys' locks, taken in key order so that two jobs cannot wait for each
        other."""
        results: dict[str, bytes] = {}
        failed: UnitFailedError | None = None
        with contextlib.ExitStack() as locks:
            for unit in units:
                locks.enter_context(self._cache.lock(unit.kind, unit.key))
            todo = []
            for unit in units:  # another job may have stored it while this one waited for the lock
                payload = self._cache.get(unit.kind, unit.key)
                if payload is None:
                    todo.append(unit)
                else:
                    results[unit.key] = payload
                    self._note(_hit(unit, self._now()), total)
            for outcome in self._started().run(todo) if todo else ():
                if outcome.error is not None:
                    failed = failed or UnitFailedError(outcome.unit, outcome.error)
                if outcome.result is None:
                    continue
                self._cache.put(outcome.unit.kind, outcome.unit.key, outcome.result)
                results[outcome.unit.key] = outcome.result
                self._note(self._row(outcome), total)
        if failed is not None:
            raise failed
        return results

    def _started(self) -> Executor:
        """The executor, started when the first unit really has to run."""
        if self._executor is None:
            self._executor = self._make_executor()
        return self._executor

    def _row(self, outcome: Outcome) -> UnitRow:
        unit = outcome.unit
        started = outcome.started_s - self._epoch
        return UnitRow(
            unit.kind,
            unit.key,
            unit.name,
            started,
            outcome.seconds,
            outcome.worker,
            "miss",
            outcome.attempts,
        )

    def _note(self, row: UnitRow, total: int) -> None:
        self.rows.append(row)
        self._done += 1
        if self._progress is not None:
            self._progress(row, self._done, total)

    def _now(self) -> float:
        return time.time() - self._epoch

    @property
    def findings(self) -> list[Diagnostic]:
        """What the cache had to say: damaged entries, a disk that refuses."""
        return [Diagnostic("SW_CACHE", w, severity="warning") for w in self._cache.warnings]

    def close(self) -> None:
        """End the executor if it was started."""
        if self._executor is not None:
            self._executor.close()

    def __enter__(self) -> UnitService:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _hit(unit: WorkUnit, now: float) -> UnitRow:
    return UnitRow(unit.kind, unit.key, unit.name, now, 0.0, "cache", "hit")
