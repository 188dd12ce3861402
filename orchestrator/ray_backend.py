"""The Ray executor: long-lived compile actors that hold no state between units.

Units go to the actors largest first, at most two in flight per actor. A unit whose actor or node
died is submitted again, up to three times, because units are idempotent; Ray restarts the actor. A
local Ray is started (and ended) by this module when there is none to join: inside a Ray job or with
RAY_ADDRESS set, it joins that cluster.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
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
        remote: Any = ray.remote(CompileActor)
        options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 0}
        self._actors = [remote.options(**options).remote(f"ray-{k}") for k in range(count)]

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
        waiting = [(unit, 1) for unit in sorted(units, key=lambda u: len(u.payload))]
        load = dict.fromkeys(range(len(self._actors)), 0)
        flight: dict[Any, tuple[WorkUnit, int, int]] = {}
        while waiting or flight:
            while waiting and min(load.values()) < IN_FLIGHT_PER_ACTOR:
                unit, tries = waiting.pop()
                index = min(load, key=lambda k: load[k])
                flight[self._actors[index].run.remote(unit)] = (unit, tries, index)
                load[index] += 1
            (done,), _ = self._ray.wait(list(flight), num_returns=1)
            unit, tries, index = flight.pop(done)
            load[index] -= 1
            try:
                yield _with_attempts(self._ray.get(done), tries)
            except self._lost():
                if tries >= MAX_ATTEMPTS:
                    yield _poisoned(unit, tries, f"ray-{index}")
                else:
                    waiting.append((unit, tries + 1))

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
        for actor in self._actors:
            self._ray.kill(actor)
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


def _poisoned(unit: WorkUnit, tries: int, worker: str) -> Outcome:
    error = SimulationError(
        "SW_UNIT_POISONED",
        f"{unit.kind} unit {unit.name} ({unit.key[:12]}) ended {tries} workers",
        None,
        "run it alone with --executor inline to see why",
    )
    return Outcome(unit, None, error, worker, time.time(), 0.0, tries)
