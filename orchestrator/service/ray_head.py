"""A Ray of this host in a process of its own, for a program that has none to join.

Ray forks to start its processes and runs Python in the children, which may lock up where the
program has threads; JAX has some and warns of it. So a fresh interpreter that has nothing but Ray
starts them, whatever the program has loaded, which then joins what was started. The process ends
its Ray when the program closes the socket, or is gone.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from shardwright.compiler.diagnostics import ExecutionError
from shardwright.orchestrator.service.process_backend import start_worker

_PATIENCE_S = 5.0  # for Ray to end its own processes, before they are killed
_STARTS = 2  # Ray gives up on a node that is not there after 30 s, which a busy host may need


class RayHead:
    """A Ray with so many CPUs that starts while we go on. Its workers inherit this environment."""

    def __init__(self, cpus: int) -> None:
        self.cpus = cpus
        self._worker = start_worker(__name__, cpus)

    def address(self) -> str:
        """Where to join it, once it runs. Raises ExecutionError (SW_RAY_START)."""
        for _again in range(_STARTS - 1):
            with suppress(EOFError, OSError):
                return self._told()
            self._worker.end()
            self._worker = start_worker(__name__, self.cpus)
        try:
            return self._told()
        except (EOFError, OSError):
            code = self._worker.process.wait()
            raise ExecutionError(
                "SW_RAY_START",
                f"a Ray of this host requires a process that starts it, and {_STARTS} ended,"
                f" the last one with exit code {code}",
                hint="see what they print on stderr; `--executor process` needs no Ray",
            ) from None

    def _told(self) -> str:
        address = self._worker.connection.recv()
        assert isinstance(address, str)
        return address

    def end(self) -> None:
        """End it and everything it started."""
        self._worker.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._worker.process.wait(_PATIENCE_S)
        self._worker.end()


def start(cpus: int) -> str:
    """Start a Ray from this process; its address."""
    import ray

    ray.init(
        address="local",  # a cluster that happens to run here was not asked for
        num_cpus=cpus,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,  # what actors print is for the program that has them
    )
    address: str = ray.get_runtime_context().gcs_address
    return address


def end() -> None:
    """End the Ray that this process has started."""
    import ray

    ray.shutdown()


def _serve(connection: Connection, cpus: int) -> None:
    address = start(cpus)
    with suppress(EOFError, OSError):  # the program is done, or gone
        connection.send(address)
        connection.recv()
    end()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
