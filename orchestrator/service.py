"""Units through the cache: each distinct unit is computed once, whoever asks, and every unit leaves
a row for the report and lines in the event log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from compiler.diagnostics import Diagnostic
from orchestrator.batch import Batch, Counts, Note, UnitRow
from orchestrator.cache import Cache
from orchestrator.events import EventLog
from orchestrator.executor import Executor, WorkUnit
from orchestrator.flight import fly


class UnitService:
    """Runs units of a job on one executor through one cache."""

    def __init__(
        self,
        executor: Callable[[], Executor],
        cache: Cache,
        progress: Note | None = None,
        events: EventLog | None = None,
    ) -> None:
        self._make_executor = executor
        self._executor: Executor | None = None
        self._cache = cache
        self._progress = progress
        self._events = events or EventLog()
        self._epoch = time.time()
        self.rows: list[UnitRow] = []

    def run(self, units: Sequence[WorkUnit]) -> dict[str, bytes]:
        """Results by key.

        Raises UnitFailedError with the first unit's error, after the other units are stored, and
        UnitDefectError for what nobody meant to raise.
        """
        batch = Batch(units, self._cache, self._emit, self._note, self._epoch)
        try:
            # Closed here and now: what is in flight ends before its locks are given back.
            with closing(fly(self._started, batch)) as flight:
                for outcome in flight:
                    batch.settle(outcome)
        finally:
            batch.release()
        failure = batch.first_failure()
        if failure is not None:
            raise failure
        return batch.results

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
