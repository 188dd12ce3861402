"""The unsharded JAX run of a job, in a process of its own beside compilation and the value run.

The process is a fresh interpreter, as workers are: it loads nothing of the program that asked. It
ends with the block that started it, whatever happens in that block, so that a failed or interrupted
job leaves nothing behind. The first state, which both runs begin with, is drawn there once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from shardwright.compiler.diagnostics import DiagnosticError, SimulationError
from shardwright.compiler.frontend.user_code import told
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.road.numerics import (
    Leaves,
    Reference,
    Rounding,
    measure_rounding,
    run_unsharded,
)
from shardwright.orchestrator.service import logs
from shardwright.orchestrator.service.process_backend import Worker, start_worker

T = TypeVar("T")


class Unsharded:
    """A run that goes on in its process. Its methods raise the DiagnosticError it ended with, or
    SimulationError (SW_REFERENCE) when it died."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._is_state_left = True

    def first_state(self) -> Leaves | None:
        """The state before the first step, by path name. It is kept nowhere: None when asked
        again."""
        if not self._is_state_left:
            return None
        self._is_state_left = False
        # Leaf by leaf, so that none is in memory twice for long.
        return dict(iter(self._received, None))

    def reference(self) -> Reference:
        """Wait for the result."""
        self.first_state()
        answer = self._received()
        assert isinstance(answer, Reference)
        return answer

    def rounding(self, num_microbatches: int) -> Rounding:
        """What rounding alone, and cutting the batch, do to the result, which has been waited
        for."""
        with suppress(OSError):  # it died: its result says so
            self._worker.connection.send(num_microbatches)
        answer = self._received()
        assert isinstance(answer, Rounding)
        return answer

    def _received(self) -> Any:
        try:
            answer = self._worker.connection.recv()
        except (EOFError, OSError):
            code = self._worker.process.wait()
            raise SimulationError(
                "SW_REFERENCE", f"the unsharded run ended with exit code {code}"
            ) from None
        if isinstance(answer, DiagnosticError):
            raise answer
        return answer


@contextmanager
def unsharded(job: JobConfig, global_batch: int) -> Iterator[Unsharded | None]:
    """Start the run; None for a job that is not compared with one."""
    if not job.run.compare:
        yield None
        return
    worker = start_worker(__name__)
    try:
        with suppress(OSError):  # it died: its result says so
            # The user's module is where this process would find it.
            worker.connection.send((sys.path, job, global_batch))
        yield Unsharded(worker)
    finally:
        worker.end()


def _serve(connection: Connection) -> None:
    logs.start()
    with suppress(EOFError, OSError):  # the job is gone
        sys.path[:], job, global_batch = connection.recv()
        # The job reads the state when it has compiled; the steps do not wait for that.
        with ThreadPoolExecutor(1) as sender:

            def begun(state: Leaves) -> None:
                sender.submit(_send_state, connection, state)

            answer = _outcome(lambda: run_unsharded(job, global_batch, begun))
        connection.send(answer)
        if isinstance(answer, Reference):
            count = connection.recv()  # the job asks, or is gone
            connection.send(_outcome(lambda: measure_rounding(job, global_batch, answer, count)))


def _outcome(work: Callable[[], T]) -> T | DiagnosticError:
    """What `work` gives, or the error it ends with."""
    try:
        return work()
    except Exception as error:
        return told(error)


def _send_state(connection: Connection, state: Leaves) -> None:
    for leaf in state.items():
        connection.send(leaf)
    connection.send(None)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
