"""The Ray executor: long-lived compile actors that hold no state between units (`seats.py`).

At most two units are in flight per actor. A local Ray is started (and ended) by this module when
there is none to join: inside a Ray job or with RAY_ADDRESS set, it joins that cluster.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.executor import Outcome, WorkUnit, attempt
from orchestrator.seats import SeatedExecutor, WorkerLostError

_ROOT = Path(__file__).resolve().parent.parent


class CompileActor:
    """Runs units in its own process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, unit: WorkUnit) -> Outcome:
        """Run one unit; the worker's name carries the process id, so that a restart shows."""
        return attempt(unit, f"{self.name}:{os.getpid()}")


class RayExecutor(SeatedExecutor):
    """See the module."""

    name = "ray"
    in_flight_per_worker = 2  # the next unit is there when one ends

    def __init__(self, workers: int = 0) -> None:
        self._token_dir: tempfile.TemporaryDirectory[str] | None = None
        if not os.environ.get("RAY_ADDRESS"):
            self._make_token()
        import ray  # reads the token settings when it is loaded

        self._ray: Any = ray
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            self._start(workers)
        super().__init__(workers or max(1, int(ray.cluster_resources().get("CPU", 1))))

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

    def _give(self, worker: Any, unit: WorkUnit) -> Any:
        return worker.run.remote(unit)

    def _first(self, tickets: Sequence[Any]) -> Any:
        (done,), _ = self._ray.wait(tickets, num_returns=1)
        return done

    def _outcome(self, ticket: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(ticket)
        except self._lost() as error:
            raise WorkerLostError from error
        return outcome

    def _lost(self) -> tuple[type[Exception], ...]:
        """Errors that say nothing about the unit: its worker or node went away."""
        errors = self._ray.exceptions
        return (
            errors.ActorDiedError,
            errors.ActorUnavailableError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
        )

    def _dismiss(self, worker: Any) -> None:
        """Ray has taken it away."""

    def close(self) -> None:
        """End the actors, and Ray when this executor started it."""
        for actor in self.workers():
            self._ray.kill(actor)
        if self._owns_ray:
            self._ray.shutdown()
        if self._token_dir is not None:
            del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]
            self._token_dir.cleanup()
