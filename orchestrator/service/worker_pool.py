"""A pool of long-lived workers: which units each has, and retries when a worker is lost.

A bounded number of units is in flight per worker. When a worker dies, another is started in its
slot and the units in flight are given again, because units are idempotent. Only the unit that was
running counts a try; after three it is given up. The last result of a worker can be lost with it,
and the unit that ended it then looks like one that stood behind; so what was in flight is given
again alone. A unit that runs longer than its limit is ended with its worker. `ray_backend.py` and
`process_backend.py` say what a worker is.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.diagnostics import ExecutionError
from shardwright.orchestrator.service.executor import (
    NO_LIMITS,
    Emit,
    Limits,
    Outcome,
    WorkUnit,
    silent,
)

MAX_ATTEMPTS = 3


class WorkerLostError(Exception):
    """A worker went away; that says nothing about its units."""


@dataclass(frozen=True, slots=True)
class _Try:
    """A unit, and which try of it this is, from 1."""

    unit: WorkUnit
    number: int
    suspect: bool = False  # a worker was lost while it was in flight: it shares none again


@dataclass(slots=True, eq=False)
class _WorkerSlot:
    """A place for one worker: who has it, and its units in order, by the ticket for their
    outcome."""

    number: int
    worker: Any = None
    arrival: Any = None  # ticket for its start; None when it is there
    given: dict[Any, _Try] = field(default_factory=dict)
    since: float = 0.0  # when its first unit began, as far as we can see
    failed_starts: int = 0  # in a row

    def has_room(self, given: _Try, most: int) -> bool:
        """Whether `given` may come to the units in flight, of which there are at most `most`."""
        if given.suspect or any(other.suspect for other in self.given.values()):
            return not self.given
        return len(self.given) < most


class PoolExecutor(ABC):
    """See the module. Tickets are hashable and stand for one outcome, or one start, each."""

    name: str
    in_flight_per_worker = 1

    def __init__(self, count: int, limits: Limits = NO_LIMITS) -> None:
        self.emit: Emit = silent
        self.observe: Emit = silent
        self.limits = limits
        # One unit more than is in flight, so that no worker waits while a result is stored.
        self.capacity = count * (self.in_flight_per_worker + 1)
        self._pool = [_WorkerSlot(number) for number in range(count)]
        self._waiting = deque[_Try]()
        self._ended = deque[Outcome]()
        self._start_workers()

    @abstractmethod
    def _start(self, number: int) -> Any:
        """A new worker, None when there is no room for one. It runs its units in the order in which
        they are given."""

    @abstractmethod
    def _arrival(self, worker: Any) -> Any:
        """The ticket for a worker's start."""

    @abstractmethod
    def _give(self, worker: Any, unit: WorkUnit) -> Any:
        """Hand over a unit and return the ticket for its outcome; does not wait."""

    @abstractmethod
    def _first(self, tickets: Sequence[Any], timeout_s: float | None) -> Any:
        """Wait until one of these is decided; None when none is in time."""

    @abstractmethod
    def _outcome(self, ticket: Any) -> Any:
        """What a ticket stands for; an outcome may come without its unit's bytes. Raises
        WorkerLostError."""

    @abstractmethod
    def _stop(self, worker: Any) -> None:
        """End a worker, or release what a lost one leaves behind."""

    def workers(self) -> list[Any]:
        """The workers there are now."""
        return [slot.worker for slot in self._pool if slot.worker is not None]

    def submit(self, unit: WorkUnit) -> None:
        """See Executor."""
        self._waiting.append(_Try(unit, 1))

    def next(self, timeout_s: float | None = None) -> Outcome | None:
        """See Executor. A unit that lost three workers has the error SW_UNIT_POISONED, one that ran
        too long SW_UNIT_TIMEOUT; SW_NO_WORKER when no worker can be started."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._hand_out()
        while not self._ended and (owner := self._owners()):
            done = self._first(list(owner), self._patience(until))
            if done is not None:
                self._collect(owner[done], done)
            self._end_overdue()
            self._hand_out()
            if time.monotonic() >= until:
                break
        return self._ended.popleft() if self._ended else None

    def cancel(self) -> None:
        """See Executor. Workers that have units end; new ones come with the next unit."""
        self._waiting.clear()
        self._ended.clear()
        for slot in self._pool:
            if slot.given:
                self._clear(slot)

    def close(self) -> None:
        """End all workers at once."""
        self._waiting.clear()
        for slot in self._pool:
            if slot.worker is not None:
                self._clear(slot)

    def _owners(self) -> dict[Any, _WorkerSlot]:
        """Slots by what is waited for: outcomes, and starts while units wait for a worker."""
        owner = {ticket: slot for slot in self._pool for ticket in slot.given}
        if self._waiting:
            owner.update((s.arrival, s) for s in self._pool if s.arrival is not None)
        return owner

    def _patience(self, until: float) -> float | None:
        """Seconds until the caller or a time limit wants to hear."""
        if self.limits.timeout_s:
            begun = (slot.since for slot in self._pool if slot.given)
            until = min(until, min(begun, default=math.inf) + self.limits.timeout_s)
        return None if until == math.inf else max(0.0, until - time.monotonic())

    def _start_workers(self) -> None:
        """Start a worker in every empty slot, except where workers never start."""
        for slot in self._pool:
            if slot.worker is None and slot.failed_starts < MAX_ATTEMPTS:
                slot.worker = self._start(slot.number)
                if slot.worker is not None:
                    slot.arrival = self._arrival(slot.worker)

    def _hand_out(self) -> None:
        if self._waiting:
            self._start_workers()
        while self._waiting:
            there = [s for s in self._pool if s.worker is not None and s.arrival is None]
            free = [s for s in there if s.has_room(self._waiting[0], self.in_flight_per_worker)]
            if not free:
                break
            slot = min(free, key=lambda slot: len(slot.given))
            if not slot.given:
                slot.since = time.monotonic()
            given = self._waiting.popleft()
            slot.given[self._give(slot.worker, given.unit)] = given
        if self._waiting and not self.workers():
            self._ended += [self._failed(given, -1, _no_worker()) for given in self._waiting]
            self._waiting.clear()

    def _collect(self, slot: _WorkerSlot, done: Any) -> None:
        """What became of a ticket; of all units of the slot, when its worker is lost."""
        try:
            outcome = self._outcome(done)
        except WorkerLostError:
            self._lost(slot)
            return
        slot.since = time.monotonic()
        if done == slot.arrival:
            slot.arrival, slot.failed_starts = None, 0
        else:
            self._end(outcome, slot.given.pop(done))

    def _end(self, outcome: Outcome, given: _Try) -> None:
        self._ended.append(replace(outcome, unit=given.unit, attempts=given.number))

    def _lost(self, slot: _WorkerSlot) -> None:
        """A worker runs its units in order: the first without a result was running."""
        unfinished = []
        for ticket, given in slot.given.items():
            try:
                self._end(self._outcome(ticket), given)
            except WorkerLostError:
                unfinished.append(given)
        if slot.arrival is not None:
            slot.failed_starts += 1
        self._clear(slot)
        self.emit("worker.lost", worker=self._label(slot.number))
        self._waiting.extendleft(replace(given, suspect=True) for given in unfinished[:0:-1])
        for given in unfinished[:1]:
            unit = given.unit
            if given.number >= MAX_ATTEMPTS:
                error = ExecutionError(
                    "SW_UNIT_POISONED",
                    f"{unit} ended {given.number} workers",
                    hint="run it alone to see why",
                )
                self._ended.append(self._failed(given, slot.number, error))
            else:
                self.emit("unit.retried", kind=unit.kind, key=unit.key, name=unit.name)
                self._waiting.append(_Try(unit, given.number + 1, suspect=True))

    def _end_overdue(self) -> None:
        """End workers whose unit is past its time limit; units behind it are given again."""
        limit = self.limits.timeout_s
        for slot in self._pool if limit else ():
            if not slot.given or time.monotonic() - slot.since < limit:
                continue
            running = next(iter(slot.given))
            if self._first([running], 0) is not None:
                continue  # it has just ended
            late, *queued = slot.given.values()
            self._clear(slot)
            self._waiting.extendleft(reversed(queued))
            self._ended.append(self._failed(late, slot.number, _overdue(late.unit, limit), limit))

    def _clear(self, slot: _WorkerSlot) -> None:
        """Stop the worker of a slot and forget its units."""
        worker, slot.worker, slot.arrival = slot.worker, None, None
        slot.given = {}
        self._stop(worker)

    def _failed(
        self, given: _Try, slot: int, error: ExecutionError, seconds: float = 0.0
    ) -> Outcome:
        started = time.time() - seconds
        return Outcome(given.unit, None, error, self._label(slot), started, seconds, given.number)

    def _label(self, slot: int) -> str:
        return f"{self.name}-{slot}" if slot >= 0 else self.name


def _overdue(unit: WorkUnit, limit_s: float) -> ExecutionError:
    return ExecutionError(
        "SW_UNIT_TIMEOUT",
        f"{unit} requires at most {limit_s:g} s, and was ended after them",
        hint="raise run.unit_timeout_s, or run it alone to see where it spends its time",
    )


def _no_worker() -> ExecutionError:
    return ExecutionError(
        "SW_NO_WORKER",
        f"no worker is left: every one of them was lost {MAX_ATTEMPTS} times while it started, or"
        " the cluster has no room for one",
        hint="see what workers print on stderr; --executor inline needs none",
    )
