"""The Ray executor: long-lived compile actors that hold no state between units.

Units go to the actors largest first, at most two in flight per actor. When an actor or its node
dies, a new one takes its seat and the units in flight are submitted again, because units are
idempotent. Only the unit that was running counts a try; after three it is given up. A local Ray is
started (and ended) by this module when there is none to join: inside a Ray job or with RAY_ADDRESS
set, it joins that cluster.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiler.diagnostics import SimulationError
from orchestrator.executor import Outcome, WorkUnit, attempt

MAX_ATTEMPTS = 3
IN_FLIGHT_PER_ACTOR = 2
_ROOT = Path(__file__).resolve().parent.parent


class CompileActor:
    """Runs units in its own process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, unit: WorkUnit) -> Outcome:
        """Run one unit; the worker's name carries the process id, so that a restart shows."""
        return attempt(unit, f"{self.name}:{os.getpid()}")


@dataclass(frozen=True, slots=True)
class _Try:
    """A unit, and which try of it this is, from 1."""

    unit: WorkUnit
    number: int


@dataclass(slots=True)
class _Seat:
    """An actor, and the units it was given, in order, by Ray's reference to their outcome."""

    number: int
    actor: Any
    given: dict[Any, _Try] = field(default_factory=dict)

    def load(self) -> int:
        """Units in flight."""
        return len(self.given)

    def has_room(self) -> bool:
        """Whether another unit may be given."""
        return len(self.given) < IN_FLIGHT_PER_ACTOR


class RayExecutor:
    """See the module."""

    name = "ray"

    def __init__(self, workers: int = 0) -> None:
        self._token_dir: tempfile.TemporaryDirectory[str] | None = None
        if not os.environ.get("RAY_ADDRESS"):
            self._make_token()
        import ray  # reads the token settings when it is loaded

        self._ray: Any = ray
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            self._start(workers)
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._seats = [_Seat(number, self._hire(number)) for number in range(count)]

    def _hire(self, number: int) -> Any:
        """A new actor."""
        remote: Any = self._ray.remote(CompileActor)
        return remote.options(num_cpus=1, max_restarts=0).remote(f"ray-{number}")

    def _start(self, workers: int) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        environment = {"PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
        runtime_env = {"env_vars": environment}
        if os.environ.get("RAY_ADDRESS"):
            self._ray.init(logging_level="warning", runtime_env=runtime_env)
        else:
            self._ray.init(
                num_cpus=workers or os.cpu_count(),
                include_dashboard=False,
                logging_level="error",
                runtime_env=runtime_env,
            )
        # ray.init replaces the handler; the job's own one has to win (it keeps finished work and
        # exits 130).
        signal.signal(signal.SIGTERM, handler)

    def _make_token(self) -> None:
        """A private token file: Ray's own default writes one to the home directory that others can
        read.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if "RAY_AUTH_MODE" in os.environ:
            return
        self._token_dir = tempfile.TemporaryDirectory(prefix="shardwright-ray-")
        path = Path(self._token_dir.name) / "token"
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)

    def run(self, units: Sequence[WorkUnit]) -> Iterator[Outcome]:
        """See Executor. A unit that lost three workers has the error SW_UNIT_POISONED."""
        waiting = [_Try(unit, 1) for unit in sorted(units, key=lambda u: len(u.payload))]
        while waiting or any(seat.given for seat in self._seats):
            while waiting and (seat := min(self._seats, key=_Seat.load)).has_room():
                given = waiting.pop()
                seat.given[seat.actor.run.remote(given.unit)] = given
            owner = {ref: seat for seat in self._seats for ref in seat.given}
            (done,), _ = self._ray.wait(list(owner), num_returns=1)
            yield from self._collect(owner[done], done, waiting)

    def _collect(self, seat: _Seat, done: Any, waiting: list[_Try]) -> Iterator[Outcome]:
        """What became of a unit; of all units of the seat, when its actor is lost."""
        try:
            outcome = self._ray.get(done)
        except self._lost():
            yield from self._replace(seat, waiting)
        else:
            yield _with_attempts(outcome, seat.given.pop(done).number)

    def _replace(self, seat: _Seat, waiting: list[_Try]) -> Iterator[Outcome]:
        """Give a seat to a new actor. An actor runs its units in order: the first without a result
        was running.
        """
        unfinished = []
        for ref, given in seat.given.items():
            try:
                yield _with_attempts(self._ray.get(ref), given.number)
            except self._lost():
                unfinished.append(given)
        seat.given.clear()
        seat.actor = self._hire(seat.number)
        running, *queued = unfinished
        waiting += queued
        if running.number >= MAX_ATTEMPTS:
            yield _poisoned(running, f"ray-{seat.number}")
        else:
            waiting.append(_Try(running.unit, running.number + 1))

    def _lost(self) -> tuple[type[Exception], ...]:
        """Errors that say nothing about the unit: its worker or node went away."""
        errors = self._ray.exceptions
        return (
            errors.ActorDiedError,
            errors.ActorUnavailableError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
        )

    def close(self) -> None:
        """End the actors, and Ray when this executor started it."""
        for seat in self._seats:
            self._ray.kill(seat.actor)
        if self._owns_ray:
            self._ray.shutdown()
        if self._token_dir is not None:
            del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]
            self._token_dir.cleanup()


def _with_attempts(outcome: Outcome, tries: int) -> Outcome:
    return Outcome(
        outcome.unit,
        outcome.result,
        outcome.error,
        outcome.worker,
        outcome.started_s,
        outcome.seconds,
        tries,
    )


def _poisoned(given: _Try, worker: str) -> Outcome:
    unit = given.unit
    error = SimulationError(
        "SW_UNIT_POISONED",
        f"{unit.kind} unit {unit.name} ({unit.key[:12]}) ended {given.number} workers",
        None,
        "run it alone with --executor inline to see why",
    )
    return Outcome(unit, None, error, worker, time.time(), 0.0, given.number)
