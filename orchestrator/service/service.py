"""Units through the cache: each distinct unit is computed once, whoever asks, and every unit leaves
a row for the report and lines in the event log."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.service.batch import Batch, Counts, Left, Note, UnitRow
from shardwright.orchestrator.service.events import EventLog
from shardwright.orchestrator.service.executor import Executor, Start, WorkUnit
from shardwright.orchestrator.service.flight import fly


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of a batch: a result or a failure for every key."""

    results: Mapping[str, bytes]
    failures: Mapping[str, Exception]

    def results_of(self, units: Sequence[WorkUnit]) -> dict[str, bytes]:
        """Results of some of the units, by key. Raises the failure of the first that has one."""
        for unit in units:
            if unit.key in self.failures:
                raise self.failures[unit.key]
        return {unit.key: self.results[unit.key] for unit in units}


class UnitService:
    """Runs units of a job on one executor through one cache."""

    def __init__(
        self,
        executor: Start,
        cache: Cache,
        progress: Note | None = None,
        events: EventLog | None = None,
        left: Left | None = None,
        refused: Collection[str] = (),
    ) -> None:
        self._make_executor = executor
        self._executor: Executor | None = None
        self._cache = cache
        self._progress = progress
        self._events = events or EventLog()
        self._left = left
        self._refused = refused
        self._epoch = time.time()
        self.rows: list[UnitRow] = []

    def run(self, units: Sequence[WorkUnit]) -> dict[str, bytes]:
        """Results by key. Raises UnitFailedError with the first unit's error, after the other units
        are stored, and UnitDefectError for what nobody meant to raise."""
        return self.settle(units).results_of(units)

    def settle(self, units: Sequence[WorkUnit]) -> Settled:
        """What became of every unit; a failure raises nothing here."""
        own = [replace(unit, job=self.job) for unit in units]
        told = self._emit, self._note, self._epoch, self._left
        batch = Batch(own, self._cache, *told, self._refused)
        try:
            # Closed here and now: what is in flight ends before its locks are given back.
            with closing(fly(self._started, batch)) as flight:
                for outcome in flight:
                    batch.settle(outcome)
        finally:
            batch.release()
        return Settled(batch.results, batch.failures)

    def _started(self) -> Executor:
        """The executor, started when the first unit really has to run."""
        if self._executor is None:
            self._executor = self._make_executor()
            self._executor.emit = self._emit
        return self._executor

    def _emit(self, event: str, **fields: Any) -> None:
        self._events(event, **fields)
        if self._executor is not None:
            self._executor.observe(event, **fields)

    def _note(self, row: UnitRow, counts: Counts) -> None:
        self.rows.append(row)
        if self._progress is not None:
            self._progress(row, counts)

    @property
    def job(self) -> str:
        """The id of this job in its event log."""
        return self._events.job

    @property
    def findings(self) -> list[Diagnostic]:
        """What the cache and the event log had to say: damaged entries, a disk that refuses."""
        told = [("SW_CACHE", text) for text in self._cache.warnings]
        told += [("SW_EVENTS", text) for text in self._events.warnings]
        return [Diagnostic(code, text, severity="warning") for code, text in told]

    def close(self) -> None:
        """End the executor if it was started."""
        if self._executor is not None:
            self._executor.close()
        self._events.close()

    def __enter__(self) -> UnitService:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
