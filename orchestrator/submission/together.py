"""Several things that compile together: their units are one batch of one service, so that a unit of
several of them is compiled once, and one that fails leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.orchestrator.road.parts import Parts
from shardwright.orchestrator.service.batch import UnitRow
from shardwright.orchestrator.service.service import Settled, UnitService
from shardwright.orchestrator.terminal.age import counted_text, oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCounts:
    """Distinct units by how they ended, and when the oldest of those that were cached was stored
    (Unix time, 0 without any)."""

    total: int
    cached: int
    compiled: int
    failed: int
    stored_s: float = 0.0

    def cells(self) -> list[str]:
        """The counts, as tables show them."""
        return [str(n) for n in (self.total, self.cached, self.compiled, self.failed)]

    def stored_text(self, command: str) -> str:
        """How many were stored, since when, and the command that asks anew."""
        return counted_text(self.cached, self.total, "units", self.stored_s, command)


@dataclass(frozen=True, slots=True)
class Task:
    """`prepare` makes the units, `finish` what they are for; either may raise a DiagnosticError."""

    prepare: Callable[[], Parts]
    finish: Callable[[Parts, Settled], None]


@dataclass(slots=True)
class Ended:
    """What became of a task."""

    units: UnitCounts
    error: DiagnosticError | None

    def as_fields(self) -> dict[str, Any]:
        """What every row of a summary has of it: `units`, `error`, `exit_code`."""
        error = self.error
        told, code = (error.diagnostic, error.exit_code) if error else (None, 0)
        return {"units": self.units, "error": told, "exit_code": code}


def end_as_dict(row: Any) -> dict[str, Any]:
    """A row of a summary, a dataclass with an `error`, in JSON form."""
    return asdict(row) | {"error": row.error.as_dict() if row.error else None}


@dataclass(slots=True)
class _Work:
    task: Task
    parts: Parts | None = None
    keys: set[tuple[str, str]] = field(default_factory=set)
    error: DiagnosticError | None = None


def compile_together(tasks: Sequence[Task], service: UnitService) -> tuple[list[Ended], UnitCounts]:
    """What became of every task, in their order, and of all distinct units."""
    works = [_Work(task) for task in tasks]
    for work in works:
        before = len(service.rows)
        try:
            work.parts = work.task.prepare()
            work.keys = {(unit.kind, unit.key) for unit in work.parts.units}
        except DiagnosticError as error:
            work.error = error
        work.keys |= {(row.kind, row.key) for row in service.rows[before:]}
    settled = service.settle([unit for work in works if work.parts for unit in work.parts.units])
    for work in works:
        if work.parts is not None:
            try:
                work.task.finish(work.parts, settled)
            except DiagnosticError as error:
                work.error = error
    rows = {(row.kind, row.key): row for row in reversed(service.rows)}  # the first end counts
    ended = [Ended(counts_of([rows[key] for key in work.keys]), work.error) for work in works]
    return ended, counts_of(list(rows.values()))


def counts_of(rows: Sequence[UnitRow]) -> UnitCounts:
    """Counts of rows; a refusal that the cache had is a failure."""
    failed = sum(bool(row.error) for row in rows)
    cached = sum(row.cache == "hit" and not row.error for row in rows)
    done = len(rows) - cached - failed
    times = (row.stored_s for row in rows if row.cache == "hit")
    return UnitCounts(
        total=len(rows), cached=cached, compiled=done, failed=failed, stored_s=oldest(times)
    )
