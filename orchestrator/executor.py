"""Where work units run: the protocol, and the executor that runs them in this process.

A unit is a pure function of its payload (`orchestrator/units.py`), so an executor may run it
anywhere, again, and in any order. Executors know nothing of graphs, caches or reports; retries and
bounded flight are theirs (`seats.py`), caching is `service.py`'s. Other executors:
`process_backend.py` and `ray_backend.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from compiler.diagnostics import DiagnosticError
from orchestrator.units import run_unit


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """One unit: `kind` picks the function, `key` identifies the result, `name` is for people."""

    kind: str
    key: str
    name: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a unit: a result or a diagnosed error, where, when (Unix time) and how long it
    ran."""

    unit: WorkUnit
    result: bytes | None
    error: DiagnosticError | None
    worker: str
    started_s: float
    seconds: float
    attempts: int = 1


class Executor(Protocol):
    """Runs units; outcomes come in any order, one per unit."""

    name: str

    def run(self, units: Sequence[WorkUnit]) -> Iterator[Outcome]:
        """Run all units.

        Errors that are not diagnosed propagate: they are bugs, not results.
        """

    def close(self) -> None:
        """Release workers."""


class InlineExecutor:
    """One unit after the other in this process: the quickest road for small jobs, and the one to
    debug."""

    name = "inline"

    def run(self, units: Sequence[WorkUnit]) -> Iterator[Outcome]:
        """See Executor."""
        for unit in units:
            yield attempt(unit, f"inline:{os.getpid()}")

    def close(self) -> None:
        """Nothing is held."""


def attempt(unit: WorkUnit, worker: str) -> Outcome:
    """Run a unit here and turn a diagnosed error into an outcome."""
    started, clock = time.time(), time.perf_counter()
    result, error = None, None
    try:
        result = run_unit(unit.kind, unit.payload)
    except DiagnosticError as caught:
        error = caught
    return Outcome(unit, result, error, worker, started, time.perf_counter() - clock)
