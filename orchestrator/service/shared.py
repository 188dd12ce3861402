"""One executor for several jobs of this process, each on a thread of its own.

A job sees a `Lease`, an executor like any other. The owner's thread, and no other, touches the real
one: it takes what the jobs have submitted, hands every outcome to the job that waits for it, and is
the thread that an interrupt reaches. Jobs that want the same unit share it through the cache, as
jobs of different processes do.
"""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue
from typing import Any

from shardwright.orchestrator.service.executor import (
    Emit,
    Executor,
    Outcome,
    Start,
    WorkUnit,
    silent,
)

Answers = SimpleQueue[Outcome | None]  # None: the owner has given up


class Lease:
    """The shared executor as one job sees it. Raises CancelledError once the owner has given up."""

    name = "shared"

    def __init__(self, shared: SharedExecutor) -> None:
        self.emit: Emit = silent  # lost workers are the owner's news
        self.observe: Emit = shared.observe
        self._shared = shared
        self._answers: Answers = SimpleQueue()
        self._flying = 0

    @property
    def capacity(self) -> int:
        """See Executor. For each job, because another may have none to run."""
        return self._shared.capacity

    def submit(self, unit: WorkUnit) -> None:
        """See Executor."""
        self._shared.check()
        self._flying += 1
        self._shared.arrivals.put((self._answers, unit))

    def next(self, timeout_s: float | None = None) -> Outcome | None:
        """See Executor."""
        self._shared.check()
        if not self._flying:
            return None
        try:
            outcome = self._answers.get(timeout=timeout_s)
        except Empty:
            return None
        if outcome is None:
            raise CancelledError
        self._flying -= 1
        return outcome

    def cancel(self) -> None:
        """Forget the units of this job; what runs goes on, for nobody."""
        self._flying, self._answers = 0, SimpleQueue()

    def close(self) -> None:
        """The executor is the owner's."""


class SharedExecutor:
    """See the module. `make` starts the real executor, at the latest for the first unit."""

    def __init__(self, make: Start, emit: Emit = silent) -> None:
        self.arrivals = SimpleQueue[tuple[Answers, WorkUnit]]()
        self._make, self._emit = make, emit
        self._executor: Executor | None = None
        # By identity: without locks (a read-only cache) two jobs may submit the same unit.
        self._waiting: dict[int, tuple[Answers, WorkUnit]] = {}
        self._is_over = False

    def lease(self) -> Lease:
        """The executor for one more job."""
        return Lease(self)

    @property
    def capacity(self) -> int:
        """Units that keep all workers busy."""
        return self._executor.capacity if self._executor else 1

    def observe(self, event: str, **fields: Any) -> None:
        """Pass on what happens, for the metrics of the back end."""
        if self._executor is not None:
            self._executor.observe(event, **fields)

    def check(self) -> None:
        """Raise CancelledError once the owner has given up."""
        if self._is_over:
            raise CancelledError

    def turn(self, timeout_s: float) -> None:
        """Give arrivals to the executor, and one outcome to its job; wait no longer than that."""
        until = time.monotonic() + timeout_s
        self._take(0.0 if self._waiting else timeout_s)
        if self._waiting:
            outcome = self.start().next(max(0.0, until - time.monotonic()))
            if outcome is not None:
                answers, _ = self._waiting.pop(id(outcome.unit))
                answers.put(outcome)

    def cancel(self) -> None:
        """End what runs, and every job when it asks next."""
        self._is_over = True
        if self._executor is not None:
            self._executor.cancel()
        while not self.arrivals.empty():
            self.arrivals.get()[0].put(None)
        for answers, _ in self._waiting.values():
            answers.put(None)

    def close(self) -> None:
        """Release workers."""
        if self._executor is not None:
            self._executor.close()

    def _take(self, timeout_s: float) -> None:
        """Everything that has arrived; for the first wait that long."""
        try:
            self._submit(*self.arrivals.get(timeout=timeout_s))
            while True:
                self._submit(*self.arrivals.get_nowait())
        except Empty:
            return

    def _submit(self, answers: Answers, unit: WorkUnit) -> None:
        self._waiting[id(unit)] = answers, unit
        self.start().submit(unit)

    def start(self) -> Executor:
        """The executor, started if it is not; workers load while the first job is captured."""
        if self._executor is None:
            self._executor = self._make()
            self._executor.emit = self._emit
        return self._executor
