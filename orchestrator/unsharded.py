"""The unsharded JAX run of a job, in a process of its own beside the value run.

The process ends with the block that started it, whatever happens in that block, so that a failed or
interrupted job leaves nothing behind.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

from compiler.diagnostics import DiagnosticError, SimulationError
from orchestrator.config import JobConfig
from orchestrator.numerics import Reference, run_unsharded


@contextmanager
def unsharded(job: JobConfig, global_batch: int) -> Iterator[Callable[[], Reference]]:
    """Start the run; what is yielded waits for its result.

    Raises the child's DiagnosticError, or SimulationError (SW_REFERENCE) when it died.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, job, global_batch), daemon=True)
    process.start()
    sender.close()

    def result() -> Reference:
        try:
            answer = receiver.recv()
        except EOFError:
            process.join()
            raise SimulationError(
                "SW_REFERENCE", f"the unsharded run ended with exit code {process.exitcode}"
            ) from None
        if isinstance(answer, DiagnosticError):
            raise answer
        assert isinstance(answer, Reference)
        return answer

    try:
        yield result
    finally:
        process.terminate()
        process.join()


def _child(sender: Connection, job: JobConfig, global_batch: int) -> None:
    """Ctrl-C reaches the whole process group; only the parent answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sender.send(run_unsharded(job, global_batch))
    except DiagnosticError as error:
        sender.send(error)
