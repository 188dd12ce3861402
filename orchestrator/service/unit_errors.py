"""Errors of units: which of them are results, how those are stored, and how a unit that failed
otherwise is kept so that it can be run again by itself.

A refusal is decided by the unit's bytes and our sources, which its key covers, so it is stored like
a result. What died, took too long or was interrupted says nothing about the unit and is not.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgpack

from shardwright.compiler.diagnostics import (
    CapacityError,
    CompileError,
    DiagnosticError,
    ExecutionError,
    ImportRuleError,
    InternalError,
    Loc,
    ShardingError,
    SimulationError,
    UsageError,
)
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.cache.cache import REFUSED
from shardwright.orchestrator.cache.entry import read_bounded, unpack_entry
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.units import KINDS
from shardwright.orchestrator.terminal.age import FLAG, age_text

_REFUSALS = {
    c.__name__: c
    for c in (CapacityError, CompileError, ImportRuleError, ShardingError, SimulationError)
}
FAILED = "failed"  # the cache's kind for units that are kept to be run again


class UnitFailedError(Exception):
    """A unit was refused; `error` says why. Compile units know op ordinals, their caller the
    lines. `stored_s` is when the refusal was stored (Unix time), 0 for one of this job."""

    def __init__(self, unit: WorkUnit, error: DiagnosticError, stored_s: float = 0.0) -> None:
        super().__init__(unit.name, error)
        self.unit = unit
        self.error = error
        self.stored_s = stored_s


class UnitDefectError(InternalError):
    """A unit raised what nobody meant to raise; a note has the traceback of its worker."""

    @classmethod
    def of_unit(cls, unit: WorkUnit, trace: str, command: str = "") -> UnitDefectError:
        """The error of a unit from its worker's traceback, with the command that reproduces it."""
        last = (trace.strip().splitlines() or [""])[-1]
        again = f"; reproduce with: {command}" if command else ""
        made = cls(
            "SW_INTERNAL",
            f"{unit.kind} unit {unit.name} raised {last[:300]}",
            hint=f"this is a defect of the compiler: report it with the file of the unit{again}",
        )
        made.add_note(trace)
        return made


def store_refusal(cache: Cache, unit: WorkUnit, error: DiagnosticError) -> None:
    """Store the error of a unit when it is a refusal."""
    if type(error) in _REFUSALS.values():
        d = error.diagnostic
        loc = [d.loc.file, d.loc.line, d.loc.scope] if d.loc else None
        row = [type(error).__name__, d.code, d.message, loc, d.hint]
        cache.put(refusal_kind(unit.kind), unit.key, msgpack.packb(row))


def stored_refusal(cache: Cache, unit: WorkUnit, here: bool = False) -> UnitFailedError | None:
    """The stored refusal of a unit, which says that it is one; `here` as in `Cache.get`. One that
    makes no sense is damaged: it is set aside, and the unit computed again."""
    kind = refusal_kind(unit.kind)
    entry = cache.find(kind, unit.key, here)
    if entry is None:
        return None
    refusal = _read_refusal(entry.payload)
    if refusal is None:
        cache.set_aside(kind, unit.key)
        return None
    stored_s = entry.about.stored_s
    said = f"this refusal is a stored one, {age_text(stored_s)}: {FLAG} (cache.fresh) asks anew"
    return UnitFailedError(unit, hinted(refusal, said), stored_s)


def stored_at(error: BaseException) -> float:
    """When the refusal that an error comes from was stored (Unix time); 0 for one of now."""
    while (cause := error.__cause__) is not None and not isinstance(error, UnitFailedError):
        error = cause
    return error.stored_s if isinstance(error, UnitFailedError) else 0.0


def _read_refusal(data: bytes) -> DiagnosticError | None:
    """Inverse of `store_refusal`; None for what it did not write."""
    try:
        name, code, message, loc, hint = msgpack.unpackb(data)
        file, line, scope = loc or ("", 0, "")
        texts = (name, code, message, hint, file, scope)
        if not all(isinstance(text, str) for text in texts) or type(line) is not int:
            return None
        return _REFUSALS[name](code, message, Loc(file, line, scope) if loc else None, hint)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def refusal_kind(kind: str) -> str:
    """The cache's kind for refusals of units of a kind."""
    return f"{kind}{REFUSED}"


def keep(cache: Cache, unit: WorkUnit) -> str:
    """Keep a failed unit; the command that runs it alone, empty when the disk refuses."""
    row = msgpack.packb([unit.kind, unit.key, unit.name, unit.payload])
    if not cache.put(FAILED, unit.key, row, here=True):  # where the command will run it
        return ""
    return f"shardwright unit {shlex.quote(str(cache.path(FAILED, unit.key)))}"


def read_kept(path: Path) -> WorkUnit:
    """The unit of a file that `keep` wrote. Raises UsageError for any other."""
    try:
        entry = unpack_entry(read_bounded(path))
    except OSError as error:
        raise UsageError("SW_USAGE", f"cannot read {path}: {error.strerror or error}") from error
    try:
        kind, key, name, payload = msgpack.unpackb(entry.payload if entry else b"")
        if kind not in KINDS or type(payload) is not bytes:
            raise ValueError(f"no unit: {kind!r}")
        return WorkUnit(kind, str(key), str(name), payload)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise UsageError(
            "SW_USAGE",
            f"unit requires a file of a failed unit, got {path}",
            hint="the message of the failure names the file",
        ) from error


def hinted(error: DiagnosticError, more: str) -> DiagnosticError:
    """The error with one more thing to do."""
    d = error.diagnostic
    return type(error)(d.code, d.message, d.loc, "; ".join(filter(None, (d.hint, more))))


def may_pass(error: DiagnosticError) -> bool:
    """Whether the same job may come to something else next time."""
    return isinstance(error, ExecutionError | InternalError)
