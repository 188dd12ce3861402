"""The process executor: worker processes of this machine, one unit at a time each (`seats.py`).

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
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from orchestrator.executor import InlineExecutor, Outcome, WorkUnit, attempt
from orchestrator.host import collect_rarely, num_cpus
from orchestrator.seats import SeatedExecutor, WorkerLostError

_ROOT = Path(__file__).resolve().parent.parent
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


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    worker: Worker
    unit: WorkUnit


class ProcessExecutor(SeatedExecutor):
    """See the module. `workers` 0: one per CPU, at most `MAX_WORKERS`."""

    name = "process"

    def __init__(self, workers: int = 0) -> None:
        super().__init__(workers or min(num_cpus(), MAX_WORKERS))

    def _hire(self, number: int) -> Worker:
        """A new worker; it loads the compiler while we go on."""
        ours, theirs = Pipe()
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        arguments = [str(theirs.fileno()), f"{self.name}-{number}"]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator.process_backend", *arguments],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        return Worker(process, ours)

    def _give(self, worker: Worker, unit: WorkUnit) -> _Ticket:
        with suppress(OSError):  # a dead worker: its outcome says so
            worker.connection.send(unit)
        return _Ticket(worker, unit)

    def _first(self, tickets: Sequence[_Ticket]) -> _Ticket:
        ready = wait([t.worker.connection for t in tickets])
        return next(t for t in tickets if t.worker.connection in ready)

    def _outcome(self, ticket: _Ticket) -> Outcome:
        try:
            answer = ticket.worker.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerLostError from error
        if isinstance(answer, str):
            raise RuntimeError(f"{ticket.unit.kind} unit {ticket.unit.name} raised\n{answer}")
        outcome: Outcome = answer
        return replace(outcome, unit=ticket.unit)

    def _dismiss(self, worker: Worker) -> None:
        worker.end()

    def close(self) -> None:
        """End all workers at once."""
        for worker in self.workers():
            worker.end()


class AutoExecutor:
    """A single unit runs in this process, while the workers for the many that follow it start."""

    name = "auto"

    def __init__(self, workers: int = 0) -> None:
        self._here, self._workers = InlineExecutor(), ProcessExecutor(workers)

    def run(self, units: Sequence[WorkUnit]) -> Iterator[Outcome]:
        """See Executor."""
        return (self._workers if len(units) > 1 else self._here).run(units)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


def _serve(connection: Connection, name: str) -> None:
    """The worker: answer units until the job closes the socket."""
    collect_rarely()
    import_module("compiler.driver")  # what compile units need, loaded before the first comes
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout belongs to the job's report
    with suppress(EOFError, OSError):
        while True:
            connection.send(_answer(connection.recv(), name))


def _answer(unit: WorkUnit, name: str) -> Outcome | str:
    """The outcome without the unit's bytes, or the traceback of what was not diagnosed."""
    try:
        return replace(attempt(unit, f"{name}:{os.getpid()}"), unit=replace(unit, payload=b""))
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), sys.argv[2])
