"""Where work units run: the protocol, and the executor that runs them in this process.

A unit is a pure function of its payload (`orchestrator/service/units.py`), so an executor may run
it anywhere, again, and in any order. Executors know nothing of graphs, caches or reports:
`flight.py` keeps a bounded number of units with them, `service.py` caches, `worker_pool.py`
replaces lost workers. Other executors: `process_backend.py` and `ray_backend.py`.
"""

from __future__ import annotations

import os
import re
import resource
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardwright.compiler.diagnostics import DiagnosticError, ExecutionError
from shardwright.orchestrator.service.logs import tell
from shardwright.orchestrator.service.units import key_parts, parts_digest, run_unit

Emit = Callable[..., None]
"""Takes the name of an event and its fields (`events.py`)."""


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """One unit: `kind` picks the function, `key` identifies the result, `name` is for people,
    `parts` are what the key was made of, where that is to be explained, and `job` is whose it is
    now, for the log."""

    kind: str
    key: str
    name: str
    payload: bytes
    parts: tuple[tuple[str, str], ...] = ()
    job: str = field(default="", compare=False)

    def __str__(self) -> str:
        """As errors name it."""
        return f"{self.kind} unit {self.name} ({self.key[:12]})"

    @classmethod
    def of(cls, kind: str, name: str, payload: bytes, target: str = "") -> WorkUnit:
        """The unit of a payload; `target` when the result depends on the table of a machine."""
        parts = key_parts(kind, payload, target)
        return cls(kind, parts_digest(kind, parts), name, payload, tuple(parts.items()))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one unit may take; 0 is no limit. Memory is what the unit adds to its process."""

    timeout_s: float = 0.0
    memory_bytes: int = 0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a unit: a result, a diagnosed error, or the traceback of what nobody meant to
    raise; where, when (Unix time) and how long it ran."""

    unit: WorkUnit
    result: bytes | None
    error: DiagnosticError | None
    worker: str
    started_s: float
    seconds: float
    attempts: int = 1
    defect: str = ""

    @property
    def code(self) -> str:
        """That of its error, `defect` for a traceback, empty for a result."""
        return self.error.code if self.error else "defect" if self.defect else ""


class Executor(Protocol):
    """Runs units; one outcome per unit, in any order."""

    name: str
    emit: Emit  # told what becomes of workers
    observe: Emit  # to be told of everything that happens, for the metrics of the back end

    @property
    def capacity(self) -> int:
        """Units that keep all workers busy; `submit` takes more, but they only wait."""

    def submit(self, unit: WorkUnit) -> None:
        """Take a unit; does not wait."""

    def next(self, timeout_s: float | None = None) -> Outcome | None:
        """The next outcome; None when there is none within the time, or nothing to wait for."""

    def cancel(self) -> None:
        """Forget every unit at once and end what runs; the executor takes new units after it."""

    def close(self) -> None:
        """Release workers."""


Start = Callable[[], Executor]
"""Starts an executor, when there is a unit for it."""


def silent(_event: str, **_fields: object) -> None:
    """Nobody listens."""


class InlineExecutor:
    """One unit after the other in this process: the quickest road for small jobs, and the one to
    debug. Nothing can end a unit here but its end, so it takes no time limit."""

    name = "inline"
    capacity = 1

    def __init__(self, limits: Limits = NO_LIMITS) -> None:
        self.emit: Emit = silent
        self.observe: Emit = silent
        self._limits = limits
        self._waiting = deque[WorkUnit]()

    def submit(self, unit: WorkUnit) -> None:
        """See Executor."""
        self._waiting.append(unit)

    def next(self, timeout_s: float | None = None) -> Outcome | None:
        """Run a unit, however long it takes."""
        if not self._waiting:
            return None
        return attempt(self._waiting.popleft(), f"{self.name}:{os.getpid()}", self._limits)

    def cancel(self) -> None:
        """See Executor."""
        self._waiting.clear()

    def close(self) -> None:
        """Nothing is held."""


def attempt(unit: WorkUnit, worker: str, limits: Limits = NO_LIMITS) -> Outcome:
    """Run a unit here; whatever it raises becomes an outcome, interrupts excepted."""
    started, clock = time.time(), time.perf_counter()
    result, error, defect = None, None, ""
    try:
        with bounded_memory(limits.memory_bytes):
            result = run_unit(unit.kind, unit.payload)
    except DiagnosticError as caught:
        error = caught
    except MemoryError:
        error = _out_of_memory(unit, limits)
    except Exception:
        defect = traceback.format_exc()
    seconds = time.perf_counter() - clock
    outcome = Outcome(unit, result, error, worker, started, seconds, defect=defect)
    about = {"job": unit.job, "kind": unit.kind, "key": unit.key, "name": unit.name}
    tell("unit.ran", **about, worker=worker, seconds=round(seconds, 6), code=outcome.code)
    return outcome


def _out_of_memory(unit: WorkUnit, limits: Limits) -> ExecutionError:
    given = f"{limits.memory_bytes >> 20} MiB" if limits.memory_bytes else "all of the host's"
    return ExecutionError(
        "SW_UNIT_MEMORY",
        f"{unit} requires more memory than it got: {given}",
        hint="raise run.unit_memory_gib, or run fewer workers on one host",
    )


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Inside, this process may add so many bytes to its data; more is a MemoryError. 0: no bound.
    Children inherit the bound: the partitioner's, of a partition unit."""
    if not num_bytes:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + num_bytes
    allowed = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *allowed]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """Data of this process, as RLIMIT_DATA counts it."""
    found = re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0
