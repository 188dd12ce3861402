"""What a step is made of, for people: time by function and kernel, the runs of programs on every
pipeline stage, and one call of the longest functions engine by engine.

Functions and engines are those of the last-finishing core, so that the time of all functions sums
to the breakdown of the step. A kernel is named by its number in its function: programs may come
without the user's locations. All is plain data and bounded in size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardwright.compiler.isa.program import Call, Repeat
from shardwright.compiler.neff.schedule import run_counts
from shardwright.compiler.timing.evaluate import KernelTime
from shardwright.sim_cluster.timing.actors import ClassResult, Ran
from shardwright.sim_cluster.timing.macro import Place, Stretch
from shardwright.sim_cluster.timing.stage_order import runs_of
from shardwright.sim_cluster.timing.step_time import Replayed
from shardwright.sim_cluster.timing.trace import Slice, lanes

MAX_RUNS = 4000
"""Program runs of a chart; with more, neighbouring runs of one stage are drawn as one."""
MAX_SLICES = 1200
"""Slices of a timeline; of more, the shortest are left out."""
TIMELINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTime:
    """A function of a program on the last-finishing core. Number -1 is the program's launch, or,
    without a program, the wait for messages of other stages.

    `charged_ps` is what all `calls` of a step took, by category; `kernels` are those of one call
    that shares nothing with others, in order.
    """

    program: str
    number: int
    calls: int
    charged_ps: Mapping[str, int]
    kernels: tuple[KernelTime, ...]


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One run of a program on a stage, or `runs` in a row."""

    stage: int
    program: str
    number: int  # of the first run, among those of the program
    runs: int
    start_ps: int
    end_ps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What one queue, or the core, does: (name, start, end) since the call began."""

    name: str
    slices: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One call of a function; `left_out` slices were too short to be kept."""

    program: str
    number: int
    duration_ps: int
    tracks: tuple[Track, ...]
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step is made of."""

    functions: tuple[FunctionTime, ...]
    runs: tuple[ProgramRun, ...]
    timelines: tuple[Timeline, ...]


def step_parts(timing: Replayed) -> StepParts:
    """The parts of a timed step."""
    functions = sorted(_functions(timing), key=lambda f: -sum(f.charged_ps.values()))
    runs = [run for stage in range(len(timing.stages_ps)) for run in _runs(timing, stage)]
    longest = {f.program: f for f in reversed(functions) if f.number >= 0}
    shown = sorted(longest.values(), key=functions.index)[:TIMELINES]
    drawn = (_timeline(timing, (f.program, f.number)) for f in shown)
    return StepParts(
        functions=tuple(functions),
        runs=tuple(_bounded(runs)),
        timelines=tuple(timeline for timeline in drawn if timeline is not None),
    )


def _functions(timing: Replayed) -> Iterator[FunctionTime]:
    """Every place of the last-finishing core."""
    last, step = timing.last, timing.step
    schedule = step.schedules[timing.stage_of[timing.results.index(last)]]
    runs, calls = run_counts(schedule), Counter[Place]()
    for name, count in runs.items():
        calls[name, -1] += count
        _count(name, step.programs[name].steps, count, calls)
    for place, charged in last.placed_ps.items():
        code = _first_call(timing.macros, place) if place in calls and place[1] >= 0 else ()
        yield FunctionTime(
            program=place[0],
            number=place[1],
            calls=calls[place],
            charged_ps=charged,
            kernels=tuple(kernel for op in code for kernel in op.segment.kernels),
        )


def _count(program: str, steps: Sequence[Call | Repeat], times: int, calls: Counter[Place]) -> None:
    """Add how often `steps` call every function."""
    for step in steps:
        if isinstance(step, Repeat):
            _count(program, step.steps, times * step.trip, calls)
        else:
            calls[program, step.function] += times


def _first_call(macros: Mapping[str, Sequence[object]], place: Place) -> list[Stretch]:
    """The stretches of one call of a function; they are the same objects in every call."""
    own = (op for op in macros[place[0]] if isinstance(op, Stretch) and op.place == place)
    return list({id(op): op for op in own}.values())


def _runs(timing: Replayed, stage: int) -> Iterator[ProgramRun]:
    """The program runs of a stage in order; those that were not replayed one by one, because they
    repeat, are one."""
    spans = [span for span in timing.last_of(stage).spans if span.lane == "program"]
    runs = list(runs_of(timing.step.schedules[stage]))
    missing = len(runs) - len(spans)
    kept = next((i for i, s in enumerate(spans) if s.name != runs[i].label), len(spans))
    for place, span in enumerate(spans):
        if place == kept and missing:
            before = spans[kept - 1].end_ps if kept else 0
            yield ProgramRun(stage, "repeated", runs[kept].number, missing, before, span.start_ps)
        run = runs[place if place < kept else place + missing]
        yield ProgramRun(stage, run.program, run.number, 1, span.start_ps, span.end_ps)


def _bounded(runs: list[ProgramRun]) -> list[ProgramRun]:
    """As many runs as fit a chart: neighbours of a stage become one, in equal groups."""
    size = -(-len(runs) // MAX_RUNS)
    if size <= 1:
        return runs
    out = []
    for _, own in groupby(runs, key=lambda run: run.stage):
        stage = list(own)
        out += [_as_one(stage[first : first + size]) for first in range(0, len(stage), size)]
    return out


def _as_one(group: Sequence[ProgramRun]) -> ProgramRun:
    programs = {run.program for run in group}
    name = group[0].program if len(programs) == 1 else "several"
    return replace(group[0], program=name, runs=sum(r.runs for r in group), end_ps=group[-1].end_ps)


def _timeline(timing: Replayed, place: Place) -> Timeline | None:
    """The last whole call of a function on the last-finishing core; nothing where it has no code
    of its own."""
    code = _first_call(timing.macros, place)
    ran = _last_call(timing.last.ran, code)
    if not ran:
        return None
    start, end = ran[0].start_ps, ran[-1].end_ps
    spans = [
        replace(span, start_ps=max(start, span.start_ps), end_ps=min(end, span.end_ps))
        for span in timing.last.spans
        if span.lane != "program" and span.start_ps < end and span.end_ps > start
    ]
    tracks = lanes(ClassResult(spans=spans, ran=ran), timing.lnc)
    kept, left_out = _longest(list(tracks))
    return Timeline(
        program=place[0],
        number=place[1],
        duration_ps=end - start,
        tracks=tuple(
            Track(
                name=name,
                slices=tuple((s.name, s.start_ps - start, s.end_ps - start) for s in slices),
            )
            for name, slices in kept
        ),
        left_out=left_out,
    )


def _last_call(ran: Sequence[Ran], code: Sequence[Stretch]) -> list[Ran]:
    """The last run of all of `code` in a row."""
    numbers = {id(op): number for number, op in enumerate(code)}
    own = [one for one in ran if id(one.stretch) in numbers]
    starts = [i for i, one in enumerate(own) if numbers[id(one.stretch)] == 0]
    whole = (own[i : i + len(code)] for i in reversed(starts))
    return next((call for call in whole if len(call) == len(code)), [])


def _longest(
    tracks: Sequence[tuple[str, Sequence[Slice]]],
) -> tuple[list[tuple[str, list[Slice]]], int]:
    """Tracks with their longest slices, and how many were left out."""
    lengths = sorted((s.end_ps - s.start_ps for _, own in tracks for s in own), reverse=True)
    least = lengths[MAX_SLICES - 1] if len(lengths) > MAX_SLICES else 0
    kept = [(name, [s for s in own if s.end_ps - s.start_ps >= least]) for name, own in tracks]
    return kept, len(lengths) - sum(len(own) for _, own in kept)
