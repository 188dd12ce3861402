"""The unsharded JAX run of a job, in a process of its own beside the value run.

The process is a fresh interpreter, as workers are: it loads nothing of the program that asked. It
ends with the block that started it, whatever happens in that block, so that a failed or interrupted
job leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from compiler.diagnostics import DiagnosticError, SimulationError
from orchestrator.config import JobConfig
from orchestrator.numerics import Reference, run_unsharded
from orchestrator.service import logs
from orchestrator.service.process_backend import start_worker

_MODULE = "orchestrator.unsharded"


@contextmanager
def unsharded(job: JobConfig, global_batch: int) -> Iterator[Callable[[], Reference]]:
    """Start the run; what is yielded waits for its result.

    Raises the child's DiagnosticError, or SimulationError (SW_REFERENCE) when it died.
    """
    worker = start_worker(_MODULE)

    def result() -> Reference:
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):
            code = worker.process.wait()
            raise SimulationError(
                "SW_REFERENCE", f"the unsharded run ended with exit code {code}"
            ) from None
        if isinstance(answer, DiagnosticError):
            raise answer
        assert isinstance(answer, Reference)
        return answer

    try:
        with suppress(OSError):  # it died: its result says so
            # The user's module is where this process would find it.
            worker.connection.send((sys.path, job, global_batch))
        yield result
    finally:
        worker.end()


def _serve(connection: Connection) -> None:
    logs.start()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout belongs to the job's report
    with suppress(EOFError, OSError):  # the job is gone
        sys.path[:], job, global_batch = connection.recv()
        try:
            answer: Reference | DiagnosticError = run_unsharded(job, global_batch)
        except DiagnosticError as error:
            answer = error
        connection.send(answer)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
