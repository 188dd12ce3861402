"""What a person, or a program, sees on stderr while a job runs: a bar on a terminal, plain lines
elsewhere, JSON lines on request. Stdout stays the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from shardwright.orchestrator.service.batch import Counts, UnitRow
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.strict_json import dumps
from shardwright.orchestrator.terminal.terminal import say

_STAGES = {
    "capture": "captures the step from the model's source",
    "partition": "partitions it for the mesh; workers start where there are none",
    "values": "trains on all cores in values; step 1 also instruction by instruction",
}
"""What is said of stages that begin without a word of their own for a while."""
_NAMED = 3  # units that another job computes, before the rest is counted


class Progress:
    """Progress of units and steps: `form` is that of `[run] progress`, `elsewhere` what auto is
    where there is no terminal."""

    def __init__(self, form: str = "auto", elsewhere: str = "plain") -> None:
        self._form = form if form != "auto" else "bar" if sys.stderr.isatty() else elsewhere
        quiet = self._form in ("quiet", "json")
        self._console = terminal.console(stderr=True, quiet=quiet)
        self._start = time.perf_counter()
        self._bars: Bars | None = None
        self._task = TaskID(0)
        self._slow = 0  # items that took their time

    def say(self, text: str) -> None:
        """One line with the seconds since the start."""
        self._print(text)
        self._json("message", text=text)

    def stage(self, name: str) -> None:
        """A stage of the job begins."""
        self._json("stage", name=name)
        if name in _STAGES:
            self._print(_STAGES[name])

    def unit(self, row: UnitRow, counts: Counts) -> None:
        """A unit has ended."""
        self._json("unit", **asdict(row), **asdict(counts))
        text = _unit_text(row, counts)
        if self._form != "bar" or counts.total == 1:
            self._print(text)
            return
        if row.error:
            self._print(text)
        if self._advance(row.kind, counts.done, counts.total, counts_text(counts)):
            self._print(f"{row.kind} {counts_text(counts)}")

    def left_to_others(self, units: Sequence[WorkUnit]) -> None:
        """All units that are left are computed by other jobs; this one waits for them."""
        names = [unit.name for unit in units]
        self._json("waiting", kind=units[0].kind, names=names)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        self._print(f"{units[0].kind} waits for another job: {', '.join(names[:_NAMED])}{more}")

    def begin(self, kind: str, known: int, total: int) -> None:
        """Many items are to be done, beside those that are known; the first may take a while."""
        self._json(kind, text="", done=0, total=total, known=known)
        at = f"0/{total}{f', {known} known' if known else ''}"
        if total and self._form == "bar":
            self._advance(kind, 0, total, at)
        elif total:
            self._print(f"{kind} {at}")

    def item(self, kind: str, text: str, done: int, total: int, quick: bool = False) -> None:
        """One of many items is done; `text` says what it came to. A `quick` one took next to
        nothing, and says nothing of the time that others will take."""
        elapsed = time.perf_counter() - self._start
        self._slow += not quick
        self._json(kind, text=text, done=done, total=total)
        left = f", {elapsed * (total - done) / self._slow:.0f} s left" if self._slow else ""
        left = left if done < total else ""
        if self._form == "bar":
            self._advance(kind, done, total, f"{done}/{total}{left}  {text}")
        else:
            self._print(f"{kind} {done}/{total}{left}: {text}")

    def step(self, step: int, steps: int, loss: float, reference: float | None) -> None:
        """A training step is done."""
        self._json("step", step=step + 1, steps=steps, loss=loss, reference=reference)
        against = "" if reference is None else f"   unsharded {reference:.6f}"
        self._print(f"step {step + 1:3d}/{steps}  loss {loss:.6f}{against}")

    def _advance(self, kind: str, done: int, total: int, at: str) -> bool:
        """Move the bar; whether that was its end."""
        if self._bars is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[at]}", markup=False),
            )
            self._bars = Bars(*columns, console=self._console, transient=True)
            self._bars.start()
            self._task = self._bars.add_task(kind, total=total, at="")
        self._bars.update(self._task, description=kind, completed=done, at=at)
        if done == total:
            self._end_bar()
        return done == total

    def _print(self, text: str) -> None:
        # No markup: names of units are the user's, and may have brackets.
        seconds = f"{time.perf_counter() - self._start:6.1f}s"
        self._console.print(Text.assemble((seconds, "dim"), " ", text))

    def _json(self, what: str, **fields: Any) -> None:
        if self._form == "json":
            line = {"seconds": round(time.perf_counter() - self._start, 3), "progress": what}
            say(dumps(line | fields), err=True)

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
