"""Codes, source locations and the exception tree every package raises from.

A diagnostic says what is required and what was given, points at the user's file and line when there
is one, and says what to do next. The exceptions pickle losslessly, because they cross process and
Ray boundaries.

DiagnosticError
|-- UsageError, ImportRuleError, ShardingError, CompileError, CapacityError: ValueErrors too
`-- ExecutionError, InternalError, LoadError, SimulationError
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Loc:
    """The user's file (relative to the job, `pkg:` for libraries), line and name stack of an op."""

    file: str = ""
    line: int = 0
    scope: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return place or self.scope or "unknown location"


UNKNOWN_LOC = Loc()


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding, as shown to the user and stored in `report.json`."""

    code: str
    message: str
    loc: Loc | None = None
    hint: str = ""
    severity: str = "error"

    def render(self) -> str:
        """Text form: location and code first, then the message, then what to do."""
        where = f"{self.loc}: " if self.loc and (self.loc.file or self.loc.scope) else ""
        text = f"{where}{self.severity}[{self.code}]: {self.message}"
        return f"{text}\n  help: {self.hint}" if self.hint else text

    def as_dict(self) -> dict[str, object]:
        """JSON form."""
        found = asdict(self)
        return {name: found[name] for name in ("code", "severity", "message", "loc", "hint")}


def nearest(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """At most `most` of the names that `word` may stand for, the likeliest first: those that begin
    with it, then those that are spelled like it. Case is no difference, nor is `-` for `_`, nor
    are the dashes of a flag."""
    plain = {_folded(name): name for name in known}
    meant = _folded(word)
    begun = [name for name in plain if name.startswith(meant)] if len(meant) >= _PREFIX else []
    alike = difflib.get_close_matches(meant, plain, most)
    if alike:  # without those that are much less like it than the first
        least = difflib.SequenceMatcher(None, alike[0], meant).ratio() - _SPREAD
        alike = difflib.get_close_matches(meant, alike, most, max(0.0, least))
    return [plain[name] for name in dict.fromkeys((*begun, *alike))][:most]


_PREFIX = 3  # letters from which on the beginning of a name says which (our choice)
_SPREAD = 0.1  # of difflib's ratio: names nearly as like as the first are told with it (our choice)


def _folded(name: str) -> str:
    return name.lower().replace("-", "_").lstrip("_")


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The hint for a name that is none of `known`: `did you mean a or b?`, else `otherwise`."""
    near = nearest(word, known, _MEANT)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


_MEANT = 3  # names that a hint has (our choice)


class DiagnosticError(Exception):
    """Base of every error a user can see; `exit_code` is the command's (docs/commands.md)."""

    exit_code = 70

    def __init__(self, code: str, message: str, loc: Loc | None = None, hint: str = "") -> None:
        super().__init__(code, message, loc, hint)
        self.diagnostic = Diagnostic(code, message, loc, hint)
        self.code, self.loc = code, loc

    def __str__(self) -> str:
        return self.diagnostic.render()

    def __reduce__(self) -> tuple[object, ...]:
        d = self.diagnostic
        made = (type(self), (d.code, d.message, d.loc, d.hint))
        notes = getattr(self, "__notes__", None)
        return (*made, {"__notes__": notes}) if notes else made


class UsageError(DiagnosticError, ValueError):
    """A flag, config key or file the user gave is wrong."""

    exit_code = 2


class ImportRuleError(DiagnosticError, ValueError):
    """The captured graph contains an op, type or shape the importer refuses."""


class ShardingError(DiagnosticError, ValueError):
    """A mesh, strategy or cut does not fit the graph."""


class CompileError(DiagnosticError, ValueError):
    """An op, limit or option the compiler refuses."""


class CapacityError(DiagnosticError, ValueError):
    """The plan does not fit the memory of the target."""

    exit_code = 71


class ExecutionError(DiagnosticError):
    """Work was not done to its end: its process died, was ended, or could not start. That says
    nothing about the work itself, so it is never stored as a result.
    """


class InternalError(DiagnosticError):
    """A defect of ours: something was raised that nobody meant to raise."""

    @classmethod
    def of(cls, error: BaseException, trace: str, loc: Loc | None = None) -> InternalError:
        """The error to show for an unexpected exception; `trace` is kept for the log."""
        made = cls(
            "SW_INTERNAL",
            f"{type(error).__name__}: {str(error)[:300]}",
            loc,
            "this is a defect of the compiler: report it with the model and what"
            " `shardwright --debug VERB ...` says",
        )
        made.add_note(trace)
        return made


class LoadError(DiagnosticError):
    """A file is damaged, foreign or of another version."""

    exit_code = 72


class SimulationError(DiagnosticError):
    """The simulated machine refused an instruction, or a simulated run failed."""

    exit_code = 72
