"""Errors of units: which of them are results, how those are stored, and how a unit that failed
otherwise is kept so that it can be run again by itself.

A refusal is decided by the unit's bytes and our sources, which its key covers, so it is stored like
a result. What died, took too long or was interrupted says nothing about the unit and is not.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgpack

from compiler.diagnostics import (
    CapacityError,
    CompileError,
    DiagnosticError,
    ImportRuleError,
    Loc,
    ShardingError,
    UsageError,
)
from orchestrator.cache import Cache, entry_payload
from orchestrator.executor import WorkUnit

_REFUSALS = {c.__name__: c for c in (CapacityError, CompileError, ImportRuleError, ShardingError)}
FAILED = "failed"  # the cache's kind for units that are kept to be run again


class UnitFailedError(Exception):
    """A unit was refused; `error` says why. Compile units know op ordinals, their caller the
    lines.
    """

    def __init__(self, unit: WorkUnit, error: DiagnosticError) -> None:
        super().__init__(unit.name, error)
        self.unit = unit
        self.error = error


class UnitDefectError(RuntimeError):
    """A unit raised what nobody meant to raise; the message is the traceback of its worker."""


def store_refusal(cache: Cache, unit: WorkUnit, error: DiagnosticError) -> None:
    """Store the error of a unit when it is a refusal."""
    if type(error) in _REFUSALS.values():
        d = error.diagnostic
        loc = [d.loc.file, d.loc.line, d.loc.scope] if d.loc else None
        row = [type(error).__name__, d.code, d.message, loc, d.hint]
        cache.put(_refused(unit), unit.key, msgpack.packb(row))


def stored_refusal(cache: Cache, unit: WorkUnit) -> DiagnosticError | None:
    """The stored refusal of a unit."""
    data = cache.get(_refused(unit), unit.key)
    if data is None:
        return None
    name, code, message, loc, hint = msgpack.unpackb(data)
    return _REFUSALS[name](code, message, Loc(*loc) if loc else None, hint)


def _refused(unit: WorkUnit) -> str:
    return f"{unit.kind}-refused"


def keep(cache: Cache, unit: WorkUnit) -> str:
    """Keep a failed unit; the command that runs it alone, empty when the disk refuses."""
    row = msgpack.packb([unit.kind, unit.key, unit.name, unit.payload])
    if not cache.put(FAILED, unit.key, row):
        return ""
    return f"shardwright unit {shlex.quote(str(cache.path(FAILED, unit.key)))}"


def read_kept(path: Path) -> WorkUnit:
    """The unit of a file that `keep` wrote. Raises UsageError for any other."""
    try:
        payload = entry_payload(path.read_bytes())
    except OSError as error:
        raise UsageError("SW_USAGE", f"cannot read {path}: {error.strerror}") from error
    try:
        kind, key, name, unit = msgpack.unpackb(payload or b"")
        return WorkUnit(str(kind), str(key), str(name), bytes(unit))
    except (ValueError, TypeError) as error:
        raise UsageError(
            "SW_USAGE",
            f"unit requires a file of a failed unit, got {path}",
            hint="the message of the failure names the file",
        ) from error


def with_command(error: DiagnosticError, command: str) -> DiagnosticError:
    """The error with the command that reproduces it."""
    d = error.diagnostic
    hint = "; ".join(filter(None, (d.hint, f"reproduce with: {command}" if command else "")))
    return type(error)(d.code, d.message, d.loc, hint)
