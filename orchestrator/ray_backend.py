"""The Ray executor: long-lived compile actors that hold no state between units (`seats.py`).

At most two units are in flight per actor. A local Ray is started (and ended) by this module when
there is none to join: inside a Ray job or with RAY_ADDRESS set, it joins that cluster and brings
our packages along. Payloads and results cross as uint8 arrays, through the object store when they
are large, so that nodes need no common disk.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compiler.diagnostics import UsageError
from orchestrator.executor import NO_LIMITS, Limits, Outcome, WorkUnit, attempt
from orchestrator.host import num_cpus
from orchestrator.seats import SeatedExecutor, WorkerLostError
from orchestrator.units import PACKAGES

_ROOT = Path(__file__).resolve().parent.parent
_FORWARDED = ("SHARDWRIGHT_PARTITIONER_PYTHON",)
# Ray prefixes them with `ray_`, and counters with `_total`.
_COUNTED = {
    "unit.done": ("shardwright_units_computed", "units that were computed"),
    "unit.hit": ("shardwright_units_cached", "units that the cache answered"),
    "unit.failed": ("shardwright_units_failed", "units without a result"),
    "unit.retried": ("shardwright_units_retried", "units given again after their worker was lost"),
    "worker.lost": ("shardwright_workers_lost", "workers that died"),
}


class CompileActor:
    """Runs units in its own process."""

    def __init__(self, name: str, memory_bytes: int) -> None:
        self.name = f"{name}:{os.getpid()}"  # with the process id, so that a restart shows
        self.limits = Limits(memory_bytes=memory_bytes)

    def start(self) -> str:
        """Answered once the actor is there."""
        return self.name

    def run(self, unit: WorkUnit, payload: np.ndarray) -> tuple[Outcome, np.ndarray | None]:
        """Run one unit; its outcome without bytes, and the bytes of its result."""
        outcome = attempt(replace(unit, payload=payload.tobytes()), self.name, self.limits)
        result = None if outcome.result is None else np.frombuffer(outcome.result, np.uint8)
        return replace(outcome, unit=unit, result=None), result


class RayExecutor(SeatedExecutor):
    """See the module. Raises UsageError for more workers than the cluster has CPUs."""

    name = "ray"
    in_flight_per_worker = 2  # the next unit is there when one ends

    def __init__(self, workers: int = 0, limits: Limits = NO_LIMITS) -> None:
        self._token_dir: tempfile.TemporaryDirectory[str] | None = None
        if not os.environ.get("RAY_ADDRESS"):
            self._make_token()
        import ray  # reads the token settings when it is loaded

        self._ray: Any = ray
        self._owns_ray = not ray.is_initialized()
        try:
            if self._owns_ray:
                self._start(workers)
            count = self._checked(workers)
            self._counters, self._queue = _metrics()
            super().__init__(count, limits)
            self.observe = self._count
        except BaseException:
            self._leave()
            raise

    def _checked(self, workers: int) -> int:
        """The number of workers. Ray itself would wait for CPUs that no node has."""
        cpus = self._cpus()
        if max(workers, 1) > cpus:
            raise UsageError(
                "SW_RAY_RESOURCES",
                f"run.workers requires at most the {cpus} CPUs of the Ray cluster, got {workers}",
                hint="ask for fewer workers, or add nodes with CPUs to the cluster",
            )
        return workers or cpus

    def _cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def _hire(self, number: int) -> Any:
        """A new actor; none while the nodes that are left have no CPU for it."""
        if len(self.workers()) >= self._cpus():
            return None
        remote: Any = self._ray.remote(CompileActor)
        options = remote.options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
        return options.remote(f"{self.name}-{number}", self.limits.memory_bytes)

    def _arrival(self, worker: Any) -> Any:
        return worker.start.remote()

    def _start(self, workers: int) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if os.environ.get("RAY_ADDRESS"):
            self._ray.init(logging_level="warning", runtime_env=_packages_along())
        else:
            environment = {"PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
            self._ray.init(
                address="local",  # a cluster that happens to run here was not asked for
                num_cpus=workers or num_cpus(),
                include_dashboard=False,
                logging_level="error",
                runtime_env={"env_vars": environment},
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

    def _give(self, worker: Any, unit: WorkUnit) -> Any:
        payload = np.frombuffer(unit.payload, np.uint8)
        return worker.run.remote(replace(unit, payload=b""), payload)

    def _first(self, tickets: Sequence[Any], timeout_s: float | None) -> Any:
        done, _ = self._ray.wait(tickets, num_returns=1, timeout=timeout_s)
        return done[0] if done else None

    def _outcome(self, ticket: Any) -> Any:
        try:
            answer = self._ray.get(ticket)
        except self._lost_errors() as error:
            raise WorkerLostError from error
        if isinstance(answer, str):  # a start
            return answer
        outcome, result = answer
        return replace(outcome, result=None if result is None else result.tobytes())

    def _lost_errors(self) -> tuple[type[Exception], ...]:
        """Errors that say nothing about the unit: its worker or node, or what it left in the store,
        went away."""
        errors = self._ray.exceptions
        return (
            errors.ActorDiedError,
            errors.ActorUnavailableError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
        )

    def _dismiss(self, worker: Any) -> None:
        self._ray.kill(worker)

    def _count(self, event: str, **fields: Any) -> None:
        if event in self._counters:
            self._counters[event].inc(tags={"kind": fields.get("kind", "")})
        if "left" in fields:
            self._queue.set(fields["left"])

    def close(self) -> None:
        """End the actors, and Ray when this executor started it."""
        super().close()
        self._leave()

    def _leave(self) -> None:
        if self._owns_ray:
            self._ray.shutdown()
        if self._token_dir is not None:
            del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]
            self._token_dir.cleanup()
            self._token_dir = None


def _packages_along() -> dict[str, Any]:
    """The runtime environment of actors on a cluster that is joined: our packages, as they are
    here. A Ray job has its own, its working directory."""
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return {}
    environment = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    modules = [str(_ROOT / package) for package in PACKAGES]
    return {"py_modules": modules, "env_vars": {"JAX_PLATFORMS": "cpu", **environment}}


def _metrics() -> tuple[dict[str, Any], Any]:
    """Counters by event, and the gauge of units that are not done."""
    from ray.util.metrics import Counter, Gauge

    counters: dict[str, Any] = {
        event: Counter(name, description=text, tag_keys=("kind",))
        for event, (name, text) in _COUNTED.items()
    }
    return counters, Gauge("shardwright_units_waiting", description="units without an outcome")
