"""Drawings as data: rectangles in a space of 1000 units across, which templates draw as SVG.

Every drawing stretches to the width of the page, so labels are text beside it and never inside.
Kinds name colours (`report.css`); a label says in words what a drawing shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shardwright.orchestrator.report.page.words import ps_text
from shardwright.orchestrator.report.text import Facts, Report, share_text, size_text

WIDTH = 1000.0
HEIGHT = 100.0
_LEAST = 0.4  # narrowest rectangle that can be seen
_LIMIT_SHOWN = 0.3  # of the limit; a lower peak has a drawing of its own height
_SHARING = {
    "blue": "compute parameters forward tensor",
    "teal": "memory activations backward vector",
    "purple": "bubble optimizer scalar",
    "pink": "gradients gpsimd",
    "orange": "gathered",
    "gold": "host scratch update dma_in dma_out",
    "pale": "frozen idle repeated several",
    "grey": "launch other sync core",
    "red": "wait",
}
_KINDS = {name: colour for colour, names in _SHARING.items() for name in names.split()}
_COLLECTIVES = ("orange", "gold", "pink", "red")


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle; `title` is shown where the pointer is."""

    kind: str
    left: float
    width: float
    title: str
    top: float = 0
    height: float = HEIGHT


@dataclass(frozen=True, slots=True)
class Strip:
    """One drawing across the page with what it is called, and what it says in words."""

    name: str
    label: str
    rects: tuple[Rect, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A text at a part of the width."""

    left: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes over program order: the drawing, names below it, and lines for peak and limit."""

    strip: Strip
    programs: tuple[Mark, ...]
    peak: Mark
    limit: float | None  # where the limit lies, from the top; None where it is far above
    top_text: str
    kinds: tuple[tuple[str, str], ...]


def kind_of(category: str, known: Sequence[str] = ()) -> str:
    """The colour of a category, program or queue; collectives have theirs in the order of
    `known`."""
    name = category.partition(".")[0].partition(" ")[0]
    if name in _KINDS:
        return _KINDS[name]
    moving = [c for c in known if c.startswith("collective")]
    place = moving.index(category) if category in moving else 0
    return _COLLECTIVES[place % len(_COLLECTIVES)]


def bar(parts: Mapping[str, int], whole: int, text: Any) -> Strip:
    """Parts of a whole side by side; `text` says what an amount is in words."""
    rects, left = [], 0.0
    shown = {name: part for name, part in parts.items() if part}
    for name, part in shown.items():
        width = WIDTH * part / (whole or 1)
        title = f"{name}: {text(part)}, {share_text(part, whole, 1)}"
        rects.append(Rect(kind_of(name, tuple(parts)), left, width, title))
        left += width
    label = "; ".join(f"{name} {share_text(part, whole, 1)}" for name, part in shown.items())
    return Strip("", label, tuple(rects))


def memory(section: Facts) -> Memory:
    """Live bytes over the positions of all programs, loop bodies once."""
    rows = section["timeline"]
    peak = max(rows, key=lambda row: row["live_bytes"])
    limit = section["limit_bytes"]
    top = section["peak_bytes"]
    shows_limit = top >= _LIMIT_SHOWN * limit
    top = (max(top, limit) if shows_limit else top) * 1.05
    rects = [rect for place, row in enumerate(rows) for rect in _moment(row, place, len(rows), top)]
    where = WIDTH * (rows.index(peak) + 0.5) / len(rows)
    text = f"peak in {peak['what']}: {size_text(peak['live_bytes'])} live"
    named = sum(section["argument_bytes"].values())
    live = {category for row in rows for category, size in row["categories"].items() if size}
    return Memory(
        strip=Strip("", f"{text}; named buffers hold {size_text(named)}", tuple(rects)),
        programs=tuple(_names(rows)),
        peak=Mark(where, 0.0, text),
        limit=HEIGHT * (1 - limit / top) if shows_limit else None,
        top_text=size_text(top),
        kinds=tuple((c, kind_of(c)) for c in section["categories"] if c in live),
    )


def _moment(row: Facts, place: int, count: int, top: float) -> Iterator[Rect]:
    """One column: categories on top of each other."""
    width, used = WIDTH / count, 0
    times = f" (runs {row['repeats']} times)" if row["repeats"] > 1 else ""
    for category, size in row["categories"].items():
        used += size
        title = f"{row['what']}{times}: {category} {size_text(size)}"
        height = HEIGHT * size / top
        upper = HEIGHT * (1 - used / top)
        yield Rect(kind_of(category), place * width, width, title, upper, height)


def _names(rows: Sequence[Facts]) -> Iterator[Mark]:
    left = 0.0
    for program, own in groupby(rows, key=lambda row: str(row["program"])):
        width = WIDTH * len(list(own)) / len(rows)
        yield Mark(left, width, program)
        left += width


def pipeline(report: Report) -> list[Strip]:
    """Runs of programs on every stage over the step."""
    step = report["timing"]["step_time_ps"]
    return [_stage(stage, step, len(report["step_chart"])) for stage in report["step_chart"]]


def kinds_of_runs(report: Report) -> dict[str, str]:
    """The colours of a chart of runs by what they are: forward, backward, update, or, of a step
    that is one program, that; and of what a stage repeats."""
    runs = [run for stage in report["step_chart"] for run in stage["runs"]]
    names = dict.fromkeys(program.partition(".")[0] for program, *_ in runs)
    return {name: kind_of(name) for name in names}


def _stage(stage: Facts, step: int, count: int) -> Strip:
    rects, programs, busy = [], Counter[str](), 0
    for program, first, runs, start, end in stage["runs"]:
        name = program.partition(".")[0]
        programs[name] += runs
        busy += end - start
        numbers = f"{first}" if runs == 1 else f"{first} to {first + runs - 1}"
        title = f"{program}, run {numbers}: {ps_text(start)} to {ps_text(end)}"
        rects.append(_slice(kind_of(name), start, end, step, title))
    text = ", ".join(f"{runs} x {name}" for name, runs in programs.items())
    name = f"stage {stage['stage']}" if count > 1 else "all cores"
    return Strip(name, f"{name}: {text}; in a program {share_text(busy, step, 1)}", tuple(rects))


def _slice(kind: str, start: int, end: int, whole: int, title: str) -> Rect:
    left = WIDTH * start / whole
    width = max(_LEAST, WIDTH * (end - start) / whole)
    return Rect(kind, left, width, title)


def engines(timeline: Facts) -> list[Strip]:
    """What every queue of a core does in one call of a function."""
    return [_track(track, timeline["duration_ps"] or 1) for track in timeline["tracks"]]


def _track(track: Facts, whole: int) -> Strip:
    name, rects, busy = track["name"], [], 0
    for what, start, end in track["slices"]:
        busy += end - start
        kind = "red" if what.startswith("wait ") else kind_of(name)
        rects.append(_slice(kind, start, end, whole, f"{what}: {ps_text(end - start)}"))
    text = f"{name}: {len(rects)} slices, busy {share_text(busy, whole, 1)}"
    return Strip(name, text, tuple(rects))


def line(values: Sequence[float | None], label: str) -> tuple[str, str]:
    """Points of a curve over equal steps, and what it says; what is no number is left out."""
    known = [(n, v) for n, v in enumerate(values) if v is not None]
    low, high = min(v for _, v in known), max(v for _, v in known)
    span, steps = (high - low) or 1.0, max(len(values) - 1, 1)
    points = (
        f"{WIDTH * n / steps:.1f},{5 + (HEIGHT - 10) * (1 - (v - low) / span):.1f}"
        for n, v in known
    )
    return " ".join(points), f"{label}: {known[0][1]:.4f} to {known[-1][1]:.4f}"
