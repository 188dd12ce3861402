"""The process executor: a `worker_pool.py` of processes, one unit at a time each.

A worker is a fresh interpreter that loads the compiler and no jax; units and outcomes cross a
socket. It is a session of its own, so that an interrupt at the terminal reaches the job alone,
which ends each worker with everything it started. `concurrent.futures` is not used: there, one lost
process breaks the whole pool and nobody knows which unit it had. Workers whose job is gone end
after their unit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from shardwright.orchestrator.host import collect_rarely, num_cpus, python_path
from shardwright.orchestrator.service import logs
from shardwright.orchestrator.service.executor import (
    NO_LIMITS,
    InlineExecutor,
    Limits,
    Outcome,
    WorkUnit,
    attempt,
)
from shardwright.orchestrator.service.worker_pool import PoolExecutor, WorkerLostError

MAX_WORKERS = 8  # by default: a step has one or two units that outlast all others


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A worker process and our end of its socket."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def end(self) -> None:
        """Kill it and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def start_worker(module: str, *settings: object) -> Worker:
    """A process that runs a module of ours with the number of its socket and `settings`."""
    ours, theirs = Pipe()
    own = {"PYTHONPATH": python_path(), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(theirs.fileno()), *map(str, settings)],
        # One thread of BLAS: several workers share the host (`values/value_run.py`).
        env={"OPENBLAS_NUM_THREADS": "1", **os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=2,  # stderr: stdout belongs to the job's report
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return Worker(process, ours)


class ProcessExecutor(PoolExecutor):
    """See the module. `workers` 0: one per CPU, at most `MAX_WORKERS`. A worker is the ticket of
    what it says next: that it has started, or the outcome of its one unit."""

    name = "process"

    def __init__(self, workers: int = 0, limits: Limits = NO_LIMITS) -> None:
        super().__init__(workers or min(num_cpus(), MAX_WORKERS), limits)

    def _start(self, number: int) -> Worker:
        """A new worker; it loads the compiler while we go on."""
        return start_worker(__name__, f"{self.name}-{number}", self.limits.memory_bytes)

    def _arrival(self, worker: Worker) -> Worker:
        return worker

    def _give(self, worker: Worker, unit: WorkUnit) -> Worker:
        with suppress(OSError):  # a dead worker: its outcome says so
            worker.connection.send(unit)
        return worker

    def _first(self, tickets: Sequence[Worker], timeout_s: float | None) -> Worker | None:
        ready = wait([worker.connection for worker in tickets], timeout_s)
        return next((worker for worker in tickets if worker.connection in ready), None)

    def _outcome(self, ticket: Worker) -> Any:
        try:
            return ticket.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerLostError from error

    def _stop(self, worker: Worker) -> None:
        worker.end()


class AutoExecutor(ProcessExecutor):
    """A single unit runs in this process, while the workers for the many that follow it start."""

    def __init__(self, workers: int = 0, limits: Limits = NO_LIMITS) -> None:
        super().__init__(workers, limits)
        self._held: list[WorkUnit] = []
        self._flying = 0

    def submit(self, unit: WorkUnit) -> None:
        """See Executor."""
        self._held.append(unit)

    def next(self, timeout_s: float | None = None) -> Outcome | None:
        """See Executor."""
        held, self._held = self._held, []
        if len(held) == 1 and not self._flying and not self.limits.timeout_s:
            return attempt(held[0], f"{InlineExecutor.name}:{os.getpid()}", self.limits)
        for unit in held:
            super().submit(unit)
        self._flying += len(held)
        outcome = super().next(timeout_s)
        self._flying -= outcome is not None
        return outcome

    def cancel(self) -> None:
        """See Executor."""
        self._held.clear()
        self._flying = 0
        super().cancel()


def _serve(connection: Connection, name: str, limits: Limits) -> None:
    """The worker: answer units until the job closes the socket."""
    collect_rarely()
    logs.start()
    # What compile units need, loaded before the first comes.
    import_module("shardwright.compiler.driver")
    name = f"{name}:{os.getpid()}"
    with suppress(EOFError, OSError):
        connection.send(name)
        while True:
            outcome = attempt(connection.recv(), name, limits)
            # The job has the unit: its bytes need not go back.
            connection.send(replace(outcome, unit=replace(outcome.unit, payload=b"")))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), sys.argv[2], Limits(memory_bytes=int(sys.argv[3])))
