"""The simulator of a model instance: a process of its own, which is asked within limits.

Triton runs a Python model one call at a time, and whatever waits in a call stops the instance. So
the simulator is a process that is killed where it is late, ended by itself, or not wanted any more;
the next request starts another. Both ends are here.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError, ExecutionError, InternalError
from shardwright.compiler.support.child import Child, UnwantedError, serve
from shardwright.orchestrator.triton.interface import Interface, Limits

_PROTOCOL = 5  # of pickle: arrays as they lie in memory
_LOOK_S = 1.0
_SAID = 300  # characters of what a process printed last


class Simulator:
    """The file of a version folder, run by a process that is replaced when it has to be."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._child: Child | None = None
        self._first: Interface | None = None

    def interface(self, is_wanted: Callable[[], bool] = lambda: True) -> Interface:
        """What the file takes and returns; it is loaded where it is not. Raises as `run`, LoadError
        and UsageError of `open_served`, and ExecutionError for another file than at first."""
        if self._child is None:
            self._child = self._start()
            request = ("load", str(self._folder), self._limits.level)
            try:
                found = self._ask(request, "load_timeout_s", is_wanted)
            except DiagnosticError:
                self.end()
                raise
            self._first = self._first or found
            if found != self._first:
                self.end()
                raise ExecutionError(
                    "SW_TRITON_CHANGED",
                    "the file that was loaded is required, got another in its place",
                    hint="load the model again (Triton: repository/models/NAME/load)",
                )
        assert self._first is not None
        return self._first

    def run(
        self, arrays: Mapping[str, np.ndarray], is_wanted: Callable[[], bool]
    ) -> dict[str, np.ndarray]:
        """Results by name. Raises ExecutionError where there is none: SW_TRITON_TIMEOUT,
        SW_TRITON_ENDED, SW_TRITON_CANCELLED; and what the simulator raises."""
        self.interface(is_wanted)
        found: dict[str, np.ndarray] = self._ask(("run", arrays), "request_timeout_s", is_wanted)
        return found

    def end(self) -> None:
        """End the process, if there is one."""
        if self._child is not None:
            self._child.end()
        self._child = None

    def _start(self) -> Child:
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            return Child([_python(), "-P", "-m", __name__], {**path, **_ONE_THREAD})
        except OSError as error:  # the host has no room for a process
            raise ExecutionError(
                "SW_TRITON_ENDED",
                f"load: the simulator cannot start: {error}",
                hint="the next request tries again; look at the host's memory and processes",
            ) from error

    def _ask(self, request: Any, limit: str, is_wanted: Callable[[], bool]) -> Any:
        assert self._child is not None
        seconds = getattr(self._limits, limit)
        try:
            data = self._child.ask(pickle.dumps(request, _PROTOCOL), seconds, is_wanted)
        except TimeoutError:
            self.end()
            raise ExecutionError(
                "SW_TRITON_TIMEOUT",
                f"{request[0]} requires an answer within {limit} = {seconds:g} s, got none",
                hint=f"raise parameter {limit} in config.pbtxt; the simulator starts anew",
            ) from None
        except UnwantedError:
            self.end()
            raise cancelled() from None
        except EOFError:
            status, said = self._child.ended()
            self.end()
            last = f": {said.strip()[-_SAID:]}" if said.strip() else ""
            raise ExecutionError(
                "SW_TRITON_ENDED",
                f"{request[0]}: the simulator ended with status {status}{last}",
                hint="the next request starts another; status -9 is often too little memory",
            ) from None
        value, error = pickle.loads(data)
        if error is not None:
            raise error
        return value


def cancelled() -> ExecutionError:
    """The error of a request that its client gave up."""
    return ExecutionError("SW_TRITON_CANCELLED", "the request was cancelled")


_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Instances share the host."""


def _python() -> str:
    """The interpreter. Triton's stub embeds one: its `sys.executable` may be the stub or empty."""
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.exec_prefix) / "bin" / name)


class _Host:
    """The other end: loads once, then runs."""

    def __init__(self) -> None:
        self._served: Any = None

    def answer(self, data: bytes) -> bytes:
        """The answer to a request: (value, None) or (None, the error)."""
        method, *args = pickle.loads(data)
        found: tuple[Any, DiagnosticError | None]
        try:
            found = getattr(self, f"_{method}")(*args), None
        except DiagnosticError as error:
            found = None, error
        except Exception as error:
            found = None, InternalError.of(error, traceback.format_exc())
        return pickle.dumps(found, _PROTOCOL)

    def _load(self, folder: str, level: str) -> Interface:
        from shardwright.orchestrator.triton.served import open_served

        self._served = open_served(Path(folder), level)
        found: Interface = self._served.interface
        return found

    def _run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = self._served.run(arrays)
        return found


def _end_with(parent: int) -> None:
    """End this process when the one that started it has ended, whatever it computes."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    serve(_Host().answer)
