"""Messages of one `compile`: streams by level, the log file, progress dots, the last word.

debug and info go to stdout, warning and above to stderr, all from the level the user asked for; the
log file gets everything. The dots and the final status always go to stdout, as scripts expect.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from shardwright.compiler.diagnostics import DiagnosticError, InternalError
from shardwright.orchestrator.terminal.outputs import writing
from shardwright.orchestrator.terminal.terminal import say, written

NUMBERS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
PASS_LINE = "Compiler status PASS"
_RULE = "*" * 79
_DEFECT, _VENDOR = "[INTERNAL_ERROR] ", "NCC_"
"""In front of a defect's code, as neuronx-cc has it (vllm-neuron, issue 16), and how its codes of
them begin; ours is SW_INTERNAL, since its numbers name places in its code."""


class CompileLog:
    """Where a compile speaks. Use as a context manager: the log file is closed at the end."""

    def __init__(self, path: Path, level: int) -> None:
        """Open the log file. Raises UsageError (SW_OUTPUT) when it cannot be written."""
        self.path = path
        self._level = level
        self._dots = 0
        with writing(path, "--logfile"):
            self._file: TextIO | None = path.open("w", encoding="utf-8")

    def __enter__(self) -> CompileLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the log file."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # a line that could not be written was told
                file.close()

    def say(self, level: str, text: str) -> None:
        """One message."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.note(f"{stamp} {level.upper()} {text}")
        number = NUMBERS[level]
        if number >= self._level:
            self._end_dots()
            say(f"{level.upper()}: {text}", err=number >= NUMBERS["warning"])

    def note(self, text: str) -> None:
        """Something for the log file alone."""
        if self._file is None:
            return
        try:
            written(text, self._file)
        except OSError as error:  # a full disk costs the log, not the compilation
            self.close()
            say(f"WARNING: --logfile {self.path}: {error.strerror}; going on without it", err=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage and how long it took."""
        self.say("info", f"Running {name}")
        start = time.perf_counter()
        yield
        self.say("info", f"{name} finished after {time.perf_counter() - start:.3f} seconds")

    def dot(self) -> None:
        """One step of progress."""
        say(".", end="")
        self._dots += 1

    def passed(self) -> None:
        """The line scripts wait for."""
        self._end_dots()
        say(PASS_LINE)
        self.say("info", PASS_LINE)

    def failed(self, error: DiagnosticError, facts: Sequence[tuple[str, str]]) -> None:
        """The banner of a failure: what, where, and what a report needs."""
        self._end_dots()
        d = error.diagnostic
        is_defect = isinstance(error, InternalError) or d.code.startswith(f"{_VENDOR}I")
        rows = [
            ("Error message", f"{_DEFECT if is_defect else ''}[{d.code}] {d.message}"),
            ("Error class", type(error).__name__),
            ("Error location", str(d.loc) if d.loc and d.loc.file else "Unknown"),
            *([("What to do", d.hint)] if d.hint else []),
            *facts,
            ("Log file", str(self.path)),
        ]
        for note in getattr(error, "__notes__", []):
            self.note(note)
        lines = [_RULE, f" {d.severity}[{d.code}]: the compilation failed", _RULE]
        lines += [f"{name + ':':<20} {text}" for name, text in rows]
        say("\n".join(lines), err=True)
        self.note("\n".join(lines))

    def _end_dots(self) -> None:
        if self._dots:
            say()
        self._dots = 0


class FileLog(CompileLog):
    """A log that speaks to its file alone, for one of many models."""

    def __init__(self, path: Path) -> None:
        """Open the log file. Raises UsageError (SW_OUTPUT) when it cannot be written."""
        if path.is_symlink():  # of a folder that somebody else may have made
            path.unlink()
        super().__init__(path, NUMBERS["critical"] + 1)

    def dot(self) -> None:
        """Progress is shown for all models together."""
