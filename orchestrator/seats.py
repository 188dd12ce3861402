"""Executors of long-lived workers: who has which unit, and what happens when a worker is lost.

Units go to the workers largest first, a bounded number in flight per worker. When a worker dies, a
new one takes its seat and the units in flight are given again, because units are idempotent. Only
the unit that was running counts a try; after three it is given up. `ray_backend.py` and
`process_backend.py` say what a worker is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compiler.diagnostics import SimulationError
from orchestrator.executor import Outcome, WorkUnit

MAX_ATTEMPTS = 3


class WorkerLostError(Exception):
    """A worker went away; that says nothing about its units."""


@dataclass(frozen=True, slots=True)
class _Try:
    """A unit, and which try of it this is, from 1."""

    unit: WorkUnit
    number: int


@dataclass(slots=True)
class _Seat:
    """A worker, and the units it was given, in order, by the ticket for their outcome."""

    number: int
    worker: Any
    given: dict[Any, _Try] = field(default_factory=dict)

    def load(self) -> int:
        """Units in flight."""
        return len(self.given)


class SeatedExecutor(ABC):
    """See the module. Tickets are hashable and stand for one outcome each."""

    name: str
    in_flight_per_worker = 1

    def __init__(self, count: int) -> None:
        self._seats = [_Seat(number, self._hire(number)) for number in range(count)]

    @abstractmethod
    def _hire(self, number: int) -> Any:
        """A new worker. It runs its units in the order in which they are given."""

    @abstractmethod
    def _give(self, worker: Any, unit: WorkUnit) -> Any:
        """Hand over a unit and return the ticket for its outcome; does not wait."""

    @abstractmethod
    def _first(self, tickets: Sequence[Any]) -> Any:
        """Wait until one of these is decided."""

    @abstractmethod
    def _outcome(self, ticket: Any) -> Outcome:
        """What a ticket stands for. Raises WorkerLostError."""

    @abstractmethod
    def _dismiss(self, worker: Any) -> None:
        """A worker was lost: release what it leaves behind."""

    def workers(self) -> list[Any]:
        """Who sits now."""
        return [seat.worker for seat in self._seats]

    def run(self, units: Sequence[WorkUnit]) -> Iterator[Outcome]:
        """See Executor. A unit that lost three workers has the error SW_UNIT_POISONED."""
        waiting = [_Try(unit, 1) for unit in sorted(units, key=lambda u: len(u.payload))]
        while waiting or any(seat.given for seat in self._seats):
            self._hand_out(waiting)
            owner = {ticket: seat for seat in self._seats for ticket in seat.given}
            done = self._first(list(owner))
            yield from self._collect(owner[done], done, waiting)

    def _hand_out(self, waiting: list[_Try]) -> None:
        while waiting:
            seat = min(self._seats, key=_Seat.load)
            if seat.load() >= self.in_flight_per_worker:
                return
            given = waiting.pop()
            seat.given[self._give(seat.worker, given.unit)] = given

    def _collect(self, seat: _Seat, done: Any, waiting: list[_Try]) -> Iterator[Outcome]:
        """What became of a unit; of all units of the seat, when its worker is lost."""
        try:
            outcome = self._outcome(done)
        except WorkerLostError:
            yield from self._replace(seat, waiting)
            return
        except Exception:
            del seat.given[done]  # a defect; the worker has another unit next
            raise
        yield replace(outcome, attempts=seat.given.pop(done).number)

    def _replace(self, seat: _Seat, waiting: list[_Try]) -> Iterator[Outcome]:
        """Give a seat to a new worker. A worker runs its units in order: the first without a result
        was running.
        """
        unfinished = []
        for ticket, given in seat.given.items():
            try:
                yield replace(self._outcome(ticket), attempts=given.number)
            except WorkerLostError:
                unfinished.append(given)
        seat.given.clear()
        self._dismiss(seat.worker)
        seat.worker = self._hire(seat.number)
        running, *queued = unfinished
        waiting += queued
        if running.number >= MAX_ATTEMPTS:
            yield self._poisoned(running, seat.number)
        else:
            waiting.append(_Try(running.unit, running.number + 1))

    def _poisoned(self, given: _Try, seat: int) -> Outcome:
        unit = given.unit
        error = SimulationError(
            "SW_UNIT_POISONED",
            f"{unit.kind} unit {unit.name} ({unit.key[:12]}) ended {given.number} workers",
            None,
            "run it alone with --executor inline to see why",
        )
        worker = f"{self.name}-{seat}"
        return Outcome(unit, None, error, worker, time.time(), 0.0, given.number)
