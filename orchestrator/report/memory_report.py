"""The memory of a step for people: the report's section, `--explain memory`, and what would help.

Sizes come from the compiled programs, the estimate made before compiling stands beside them. A
change is not guessed: the job is planned again with it, and what it saves is the difference of the
two estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from shardwright.compiler.machine.target import reserve_of
from shardwright.orchestrator.changes.change import changed
from shardwright.orchestrator.changes.rules import saving
from shardwright.orchestrator.changes.situation import situation_of
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import Facts, Report, size_text
from shardwright.orchestrator.road.build import Built
from shardwright.orchestrator.road.bundling import compiled_footprints
from shardwright.orchestrator.road.fitting import estimates
from shardwright.orchestrator.road.offload import host_section
from shardwright.orchestrator.runtime.memory_table import cells
from shardwright.orchestrator.terminal import terminal
from shardwright.sharding.memory.arena import Moment
from shardwright.sharding.memory.footprint import Footprint, worst_stage

LISTED = 20  # tensors at the peak that a report holds
MOMENTS = 600  # of the timeline
_BAR = 16
_PER_PROGRAM = 5  # positions of a program on the screen
_OF_A_MOMENT = ("program", "position", "what", "repeats", "live_bytes")


def memory_section(built: Built) -> Facts:
    """Memory per core after compilation: exact named buffers and arenas, and the timeline."""
    target, before = built.layout.target, built.plan.footprint
    stages = compiled_footprints(built)
    found = worst_stage(stages)
    return {
        "limit_bytes": target.limit_bytes,
        "reserve_bytes": target.reserve_bytes_per_core,
        "peak_bytes": found.peak_bytes,
        "peak_program": found.peak_program,
        "fits": found.peak_bytes <= target.limit_bytes,
        "categories": dict(found.categories),
        "argument_bytes": dict(found.argument_bytes),
        "arena_bytes": dict(found.arena_bytes),
        "estimate": {"peak_bytes": before.peak_bytes, "arena_bytes": dict(before.arena_bytes)},
        "per_stage": [
            {"stage": n, "peak_bytes": s.peak_bytes, "categories": dict(s.categories)}
            for n, s in enumerate(stages)
        ],
        "timeline": [
            {name: getattr(moment, name) for name in _OF_A_MOMENT}
            | {"categories": {c: size for c, size in moment.categories.items() if size}}
            for moment in _highest(found.timeline)
        ],
        "largest": [
            {"name": h.name, "category": h.category, "bytes": h.num_bytes, "loc": str(h.loc)}
            for h in found.held[:LISTED]
        ],
        "runtime": cells(_by_runtime(built, found, stages.index(found))),
        "bank": {
            "bytes": target.hbm_bytes_per_core * target.cores_per_stack,
            "cores": target.cores_per_stack,
        },
        **host_section(built.plan.step, target),
    }


def _by_runtime(built: Built, found: Footprint, stage: int) -> dict[str, int]:
    """What a core of a stage holds, by the runtime's categories; the sum is what the step reserves
    and the runtime's own."""
    own = {program.name for program in built.plan.step.programs if program.stage == stage}
    constants = sum(p.constant_bytes for name, p in built.programs.items() if name in own)
    return {
        "tensors": sum(found.argument_bytes.values()) - constants,
        "model constants": constants,
        "shared scratchpad": max(found.arena_bytes.values(), default=0),
        **reserve_of(built.layout.target),
    }


def _highest(timeline: Sequence[Moment]) -> Iterator[Moment]:
    """At most `MOMENTS` of a timeline and one per program: the highest of neighbours."""
    size = -(-len(timeline) // MOMENTS)
    for _, own in groupby(timeline, key=lambda moment: moment.program):
        moments = list(own)
        for first in range(0, len(moments), size):
            yield max(moments[first : first + size], key=lambda moment: moment.live_bytes)


def explain(job: JobConfig, report: Report) -> Facts:
    """The section of the report, with `suggestions`: every change that is expected to save memory,
    `{change, saves_bytes, peak_bytes, fits}`, what saves most first."""
    memory: dict[str, Any] = report["memory"]
    before, rows = memory["peak_bytes"], []
    with estimates(job, memory) as expected:
        for idea in saving(situation_of(job, report)):
            change = changed(job, idea.keys)
            needs, limit = expected(change.job)
            if (peak := round(min(needs, before))) < before:
                row = {"change": change.text, "saves_bytes": before - peak, "peak_bytes": peak}
                rows.append(row | {"fits": peak <= limit})
    return memory | {"suggestions": sorted(rows, key=lambda row: -row["saves_bytes"])}


def show(memory: Facts) -> None:
    """The timeline, the tensors at the peak and what would help, on the terminal."""
    console = terminal.console()
    console.print(_timeline(memory))
    console.print(_tensors(memory))
    if memory["suggestions"]:
        console.print(_changes(memory["suggestions"]))
    console.print(_columns(memory))


def _timeline(memory: Facts) -> Table:
    """The highest positions of every program, in order; bars show what named buffers leave."""
    named = sum(memory["argument_bytes"].values())
    title = f"bytes in use over the step, named buffers {size_text(named)}"
    columns = ("program", "position", "what", "times", "in use", "above named buffers")
    table = terminal.table(*columns, title=title, right=("position", "times", "in use"))
    top = max(max(m["live_bytes"] for m in memory["timeline"]) - named, 1)
    for program in memory["arena_bytes"]:
        rows = [m for m in memory["timeline"] if m["program"] == program]
        highest = sorted(rows, key=lambda m: -m["live_bytes"])[:_PER_PROGRAM]
        for row in sorted(highest, key=lambda m: m["position"]):
            size = row["live_bytes"]
            bar = "#" * round((size - named) / top * _BAR)
            cells = (row["position"], row["what"], row["repeats"], size_text(size), bar)
            table.add_row(program, *map(str, cells))
    return table


def _tensors(memory: Facts) -> Table:
    title = f"largest tensors at the peak, in {memory['peak_program']}"
    table = terminal.table("tensor", "category", "bytes", "where", title=title, right=("bytes",))
    for row in memory["largest"]:
        where = row["loc"].rpartition("/")[2]
        table.add_row(row["name"], row["category"], size_text(row["bytes"]), where)
    return table


def _columns(memory: Facts) -> Table:
    """A core in the columns of the runtime's report, and the bank that it shares."""
    bank = memory["bank"]
    shared = f" of {bank['cores']} cores" if bank["cores"] > 1 else ""
    table = terminal.table("column", "bytes", title="as the runtime reports it", right=("bytes",))
    for name, size in {**memory["runtime"], f"HBM bank{shared}": bank["bytes"]}.items():
        if size:
            table.add_row(name, size_text(size))
    return table


def _changes(rows: list[Facts]) -> Table:
    right = ("saves", "peak then", "fits")
    title = "what would save memory (estimated before compiling)"
    table = terminal.table("change", *right, title=title, right=right)
    for row in rows:
        saved, peak = size_text(row["saves_bytes"]), size_text(row["peak_bytes"])
        table.add_row(row["change"], saved, peak, "yes" if row["fits"] else "no")
    return table
