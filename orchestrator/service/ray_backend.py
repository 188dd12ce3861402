"""The Ray executor: long-lived compile actors that hold no state between units (`worker_pool.py`).

At most two units are in flight per actor. Payloads and results cross as uint8 arrays, through the
object store when they are large, so that nodes need no common disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.orchestrator.service import logs
from shardwright.orchestrator.service.executor import NO_LIMITS, Limits, Outcome, WorkUnit, attempt
from shardwright.orchestrator.service.ray_session import (
    RaySession,
    check_cpus,
    lost_errors,
    num_cpus_of,
    start_actor,
)
from shardwright.orchestrator.service.worker_pool import PoolExecutor, WorkerLostError

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
        logs.start_in_actor()

    def start(self) -> str:
        """Answered once the actor is there."""
        return self.name

    def run(self, unit: WorkUnit, payload: np.ndarray) -> tuple[Outcome, np.ndarray | None]:
        """Run one unit; its outcome without bytes, and the bytes of its result."""
        outcome = attempt(replace(unit, payload=payload.tobytes()), self.name, self.limits)
        result = None if outcome.result is None else np.frombuffer(outcome.result, np.uint8)
        return replace(outcome, unit=unit, result=None), result


class RayExecutor(PoolExecutor):
    """See the module. Raises UsageError for more workers than the cluster has CPUs."""

    name = "ray"
    in_flight_per_worker = 2  # the next unit is there when one ends

    def __init__(self, workers: int = 0, limits: Limits = NO_LIMITS) -> None:
        self._ray: Any = RaySession.enter(workers)
        try:
            cpus = check_cpus(self._ray, "run.workers", workers)
            self._counters, self._queue = _metrics()
            super().__init__(workers or cpus, limits)
            self.observe = self._count
        except BaseException:
            RaySession.leave()
            raise

    def _start(self, number: int) -> Any:
        """A new actor; none while the nodes that are left have no CPU for it."""
        if len(self.workers()) >= num_cpus_of(self._ray):
            return None
        name = f"{self.name}-{number}"
        return start_actor(self._ray, CompileActor, name, self.limits.memory_bytes)

    def _arrival(self, worker: Any) -> Any:
        return worker.start.remote()

    def _give(self, worker: Any, unit: WorkUnit) -> Any:
        payload = np.frombuffer(unit.payload, np.uint8)
        return worker.run.remote(replace(unit, payload=b""), payload)

    def _first(self, tickets: Sequence[Any], timeout_s: float | None) -> Any:
        done, _ = self._ray.wait(tickets, num_returns=1, timeout=timeout_s)
        return done[0] if done else None

    def _outcome(self, ticket: Any) -> Any:
        try:
            answer = self._ray.get(ticket)
        except lost_errors(self._ray) as error:
            raise WorkerLostError from error
        if isinstance(answer, str):  # a start
            return answer
        outcome, result = answer
        return replace(outcome, result=None if result is None else result.tobytes())

    def _stop(self, worker: Any) -> None:
        self._ray.kill(worker)

    def _count(self, event: str, **fields: Any) -> None:
        if event in self._counters:
            self._counters[event].inc(tags={"kind": fields.get("kind", "")})
        if "left" in fields:
            self._queue.set(fields["left"])

    def close(self) -> None:
        """End the actors, and this process's Ray with the last executor that uses it."""
        super().close()
        RaySession.leave()


def _metrics() -> tuple[dict[str, Any], Any]:
    """Counters by event, and the gauge of units that are not done."""
    from ray.util.metrics import Counter, Gauge

    counters: dict[str, Any] = {
        event: Counter(name, description=text, tag_keys=("kind",))
        for event, (name, text) in _COUNTED.items()
    }
    return counters, Gauge("shardwright_units_waiting", description="units without an outcome")
