"""What a person, or a program, sees on stderr while a job runs: a bar on a terminal, plain lines
elsewhere, JSON lines on request. Stdout stays the result."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from orchestrator.batch import Counts, UnitRow
from orchestrator.strict_json import dumps


class Progress:
    """Progress of units and steps: `form` is that of `[run] progress`, `elsewhere` what auto is
    where there is no terminal."""

    def __init__(self, form: str = "auto", elsewhere: str = "plain") -> None:
        self._form = form if form != "auto" else "bar" if sys.stderr.isatty() else elsewhere
        quiet = self._form in ("quiet", "json")
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._start = time.perf_counter()
        self._bars: Bars | None = None
        self._task = TaskID(0)

    def say(self, text: str) -> None:
        """One line with the seconds since the start."""
        self._print(text)
        self._json("message", text=text)

    def unit(self, row: UnitRow, counts: Counts) -> None:
        """A unit has ended."""
        self._json("unit", **asdict(row), **asdict(counts))
        text = _unit_text(row, counts)
        if self._form != "bar" or counts.total == 1:
            self._print(text)
            return
        if row.error:
            self._print(text)
        self._advance(row, counts)

    def step(self, step: int, steps: int, loss: float, reference: float | None) -> None:
        """A training step is done."""
        self._json("step", step=step + 1, steps=steps, loss=loss, reference=reference)
        against = "" if reference is None else f"   unsharded {reference:.6f}"
        self._print(f"step {step + 1:3d}/{steps}  loss {loss:.6f}{against}")

    def _advance(self, row: UnitRow, counts: Counts) -> None:
        """Move the bar; at the end of the batch it gives way to one line."""
        if self._bars is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[at]}"),
            )
            self._bars = Bars(*columns, console=self._console, transient=True)
            self._bars.start()
            self._task = self._bars.add_task(row.kind, total=counts.total, at="")
        text = counts_text(counts)
        self._bars.update(self._task, description=row.kind, completed=counts.done, at=text)
        if counts.done == counts.total:
            self._end_bar()
            self._print(f"{row.kind} {text}")

    def _print(self, text: str) -> None:
        # No markup: names of units are the user's, and may have brackets.
        seconds = f"{time.perf_counter() - self._start:6.1f}s"
        self._console.print(Text.assemble((seconds, "dim"), " ", text))

    def _json(self, what: str, **fields: Any) -> None:
        if self._form == "json":
            line = {"seconds": round(time.perf_counter() - self._start, 3), "progress": what}
            print(dumps(line | fields), file=sys.stderr, flush=True)

    def _end_bar(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end_bar()


def counts_text(counts: Counts) -> str:
    """`3/34, 1 cached, 12 s left`."""
    parts = [f"{counts.done}/{counts.total}"]
    parts += [f"{counts.hits} cached"] if counts.hits else []
    parts += [f"{counts.failed} failed"] if counts.failed else []
    if counts.eta_s is not None and counts.done < counts.total:
        parts.append(f"{counts.eta_s:.0f} s left")
    return ", ".join(parts)


def _unit_text(row: UnitRow, counts: Counts) -> str:
    took = "cached" if row.cache == "hit" else f"{row.seconds:.2f}s on {row.worker}"
    failed = f" failed with {row.error}" if row.error else ""
    at, _, more = counts_text(counts).partition(", ")
    return f"{row.kind} {at} {row.name}{failed} ({took}){f'; {more}' if more else ''}"
