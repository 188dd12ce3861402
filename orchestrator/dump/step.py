"""Memory and time of a whole step as text: what a core holds while programs run, and what hides
behind what. Both show what the report says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardwright.compiler.shown.charts import bytes_text, share_bar, table, time_chart, us_text
from shardwright.orchestrator.report.text import Facts, Report
from shardwright.orchestrator.road.bundling import compiled_footprints
from shardwright.sharding.memory.footprint import Footprint

if TYPE_CHECKING:
    from shardwright.orchestrator.road.build import Built

_LISTED = 40  # tensors at the peak
_BAR = 24


def memory_text(built: Built) -> str:
    """What a core of every pipeline stage holds over the step."""
    stages = compiled_footprints(built)
    lines = [
        "HBM of one core over a step. Named buffers (weights, optimizer state, gradients, what",
        "backward reads of forward) are there all the time; the arena is used by one program after",
        "another, and inside a program its bytes are shared by what lives apart.",
        f"limit of a core: {bytes_text(built.layout.target.limit_bytes)}",
    ]
    for number, stage in enumerate(stages):
        if len(stages) > 1:
            lines += ["", f"pipeline stage {number}"]
        lines += _stage(built, number, stage)
    return "\n".join(lines) + "\n"


def _stage(built: Built, number: int, found: Footprint) -> Iterator[str]:
    peak = found.peak_bytes
    yield f"peak: {bytes_text(peak)} ({peak} bytes), in {found.peak_program}"
    yield from _sizes("at the peak, by category:", found.categories)
    yield from _sizes("named buffers, by category:", found.argument_bytes)
    arenas = "arena of every program, scratch zones of its functions included:"
    yield from _sizes(arenas, found.arena_bytes, least=0)
    yield from ("", "over the step, call by call; the bar is what is in use above named buffers:")
    named = sum(found.argument_bytes.values())
    top = max((m.live_bytes for m in found.timeline), default=named) - named
    rows: list[Sequence[object]] = [("program", "call", "function", "times", "in use", "")]
    for moment in found.timeline:
        bar = share_bar(moment.live_bytes - named, top, _BAR)
        size = bytes_text(moment.live_bytes)
        rows.append((moment.program, moment.position, moment.what, moment.repeats, size, bar))
    yield from table(rows, right=(1, 3, 4))
    yield from ("", "largest tensors at the peak:")
    held = [(f"  {h.name}", h.category, bytes_text(h.num_bytes), h.loc) for h in found.held]
    yield from table(held[:_LISTED], right=(2,))
    yield from ("", "named buffers of this stage: role, bytes, name")
    buffers = [
        (f"  {b.role}", bytes_text(b.local_type.num_bytes * b.slots_on(number)), b.name)
        for b in sorted(built.plan.step.buffers.values(), key=lambda b: -b.local_type.num_bytes)
        if b.on(number)
    ]
    yield from table(buffers, right=(1,))


def _sizes(title: str, parts: Mapping[str, int], least: int = 1) -> Iterator[str]:
    yield from ("", title)
    rows = [(f"  {name}", bytes_text(size)) for name, size in parts.items() if size >= least]
    yield from table(rows, right=(1,))


def time_text(report: Report) -> str:
    """Where the time of a step goes, what is hidden behind other work, and one call of the longest
    functions on the clock.
    """
    return "\n".join(_time(report)) + "\n"


def _time(report: Report) -> Iterator[str]:
    timing = report["timing"]
    step = timing["step_time_ps"]
    yield f"one step under profile {timing['profile']}: {us_text(step)}"
    yield from ("", "where it goes: every moment of the last core is charged once")
    yield from _shares(timing["breakdown_ps"], step)
    yield from ("", "functions by the time of all their calls (functions/NAME has their code):")
    functions = [
        (
            f"  {row['program']}/{row['function']}",
            f"{row['calls']} calls",
            us_text(row["time_ps"]),
            f"{row['time_ps'] / max(step, 1):.1%}",
        )
        for row in sorted(report["functions"], key=lambda row: -row["time_ps"])
    ]
    yield from table(functions, right=(1, 2, 3))
    yield from ("", "hidden: work that takes time of its own behind what is charged above")
    yield from _shares(timing["hidden_ps"], step)
    yield from ("", "collectives: time of all of a kind, and how much of it nothing hides")
    rows: list[Sequence[object]] = [
        ("  collective", "times", "stream", "takes", "exposed", "hidden")
    ]
    for row in report["collectives"]:
        took, exposed = row["time_ps"], row["exposed_ps"]
        name = f"  {row['kind']} over {row['axis']} of {bytes_text(row['bytes'])}"
        hidden = f"{max(0, took - exposed) / took:.0%}" if took else ""
        stream = "" if row["stream"] is None else row["stream"]  # of the host's link
        rows.append((name, row["count"], stream, us_text(took), us_text(exposed), hidden))
    yield from table(rows, right=(1, 2, 3, 4, 5))
    for one in report["timelines"]:
        yield from _timeline(one)


def _shares(parts: Mapping[str, int], step: int) -> Iterator[str]:
    rows = [
        (f"  {name}", us_text(ps), f"{ps / max(step, 1):.1%}", share_bar(ps, step, _BAR))
        for name, ps in parts.items()
        if ps
    ]
    yield from table(rows, right=(1, 2))


def _timeline(one: Facts) -> Iterator[str]:
    """Tracks of one call; a row per slice."""
    whole = one["duration_ps"]
    yield from ("", f"one call of {one['function']} in {one['program']}, {us_text(whole)}:")
    if one["left_out"]:
        yield f"  the shortest {one['left_out']} slices are left out"
    rows: list[Sequence[object]] = [("  track", "what", "from", "to", f"0 .. {us_text(whole)}")]
    for track in one["tracks"]:
        for name, start, end in track["slices"]:
            chart = time_chart(start, end, whole, 1.0)
            rows.append((f"  {track['name']}", name, us_text(start), us_text(end), chart))
    yield from table(rows, right=(2, 3))
