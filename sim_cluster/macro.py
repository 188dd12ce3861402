"""Programs as macro-operations: compute stretches (launches among them), collective starts and
waits.

A program's functions are timed once each by the evaluator at a few shares of the DMA engines; calls
and layer loops only repeat the resulting stretches. The cluster loop (`run_timing.py`) replays the
list of every class of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from compiler.dtypes import DType
from compiler.evaluate import RegionTime, Segment, function_segments, joined
from compiler.isa.program import Call, CollectiveCall, Function, Program, Repeat
from compiler.neff.schedule import STAGE_AXIS, Schedule, Transfer, flat, run_counts
from compiler.target import Target

HALF_SHARE = (
    0.5  # second point at which stretches are evaluated; durations between are interpolated
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Compute between collective events: duration with all of the DMA engines, and with half of
    them."""

    full_ps: int
    half_ps: int
    compute_ps: int  # time with any compute engine busy
    segment: Segment
    label: str
    charge: str = ""  # what all of it is charged to; empty: compute, the rest of the time memory

    def duration_ps(self, dma_share: float) -> float:
        """Duration at a share of the DMA engines: linear in 1 / share through the two evaluated
        points."""
        slope = (self.half_ps - self.full_ps) / (1 / HALF_SHARE - 1)
        return self.full_ps + slope * (1 / dma_share - 1)


@dataclass(frozen=True, slots=True)
class Start:
    """A collective is handed to its stream."""

    call: CollectiveCall
    slot: int  # distinguishes the collectives in flight of one function call


@dataclass(frozen=True, slots=True)
class Wait:
    """The core blocks until the collective started under the same slot has finished."""

    slot: int


@dataclass(frozen=True, slots=True)
class Send:
    """A named buffer is handed to the network, for the same core of another stage."""

    call: CollectiveCall  # a permute over stages with one pair


@dataclass(frozen=True, slots=True)
class Receive:
    """The core blocks until the message with the same call and number has arrived."""

    call: CollectiveCall


MacroOp = Stretch | Start | Wait | Send | Receive


def function_macros(function: Function, target: Target) -> tuple[MacroOp, ...]:
    """The macro-operations of one call of `function`."""
    full = function_segments(function, target)
    half = function_segments(function, target, dma_share=HALF_SHARE, recorded=False)
    out: list[MacroOp] = []
    for a, b in zip(full, half, strict=True):
        if a.kind == "compute":
            out += _stretches(a, b, function.name)
        elif a.kind == "start":
            out.append(Start(function.collectives[a.collective], a.collective))
        else:
            out.append(Wait(a.collective))
    return tuple(out)


def _stretches(full: Segment, half: Segment, label: str) -> Iterator[Stretch]:
    """A segment as stretches of regions that lose about as much with half of the DMA engines: what
    a collective costs depends on the code it runs beside.
    """
    groups = groupby(_paired(full, half), key=lambda pair: _sensitivity(*pair))
    for regions in (list(group) for _, group in groups):
        (own,) = joined([a for a, _ in regions])
        slower = sum(max(a.duration_ps, b.duration_ps) for a, b in regions)
        yield Stretch(own.duration_ps, slower, own.compute_ps, own, label)


def _paired(full: Segment, half: Segment) -> Sequence[tuple[RegionTime, RegionTime]]:
    """The regions of both; all of them as one when physical cores do not meet at the same ones."""
    if [r.name for r in full.regions] == [r.name for r in half.regions]:
        return list(zip(full.regions, half.regions, strict=True))
    return [(_whole(full), _whole(half))]


def _whole(segment: Segment) -> RegionTime:
    return RegionTime(
        segment.regions[0].name,
        segment.duration_ps,
        segment.busy_ps,
        segment.compute_ps,
        segment.hbm_bytes,
        segment.lone_ps,
    )


def _sensitivity(full: RegionTime, half: RegionTime) -> int:
    """How much of its time a region adds with half of the DMA engines, in quarters."""
    return round(4 * (half.duration_ps / max(full.duration_ps, 1) - 1))


def program_macros(program: Program, target: Target) -> tuple[MacroOp, ...]:
    """The whole program: a launch, then every call in order, loops expanded."""
    bodies = [function_macros(f, target) for f in program.functions]
    return (_launch(program.name, target), *_steps(program.steps, bodies))


def _launch(name: str, target: Target) -> Stretch:
    """The host starts a program on the core."""
    ps = target.core.program_start_ps
    return Stretch(ps, ps, 0, Segment("compute", ps), f"launch {name}", "launch")


def _steps(
    steps: Sequence[Call | Repeat], bodies: Sequence[tuple[MacroOp, ...]]
) -> Iterator[MacroOp]:
    for step in steps:
        if isinstance(step, Call):
            yield from bodies[step.function]
        else:
            body = tuple(_steps(step.steps, bodies))
            for _ in range(step.trip):
                yield from body


def schedule_macros(
    macros: Mapping[str, Sequence[MacroOp]],
    schedule: Schedule,
    transfers: Sequence[Transfer] = (),
    stage: int = 0,
) -> tuple[MacroOp, ...]:
    """One whole step of a core of a stage: every program of its schedule with what it receives
    before and sends after. `macros` are those of the programs by name.
    """
    runs, done = run_counts(schedule), Counter[str]()
    out: list[MacroOp] = []
    for name in flat(schedule):
        done[name] += 1
        own = [t for t in transfers if (t.target, t.reader) == (stage, name)]
        out += [Receive(message_call(t)) for t in own if not t.once or done[name] == 1]
        out += macros[name]
        own = [t for t in transfers if (t.source, t.writer) == (stage, name)]
        out += [Send(message_call(t)) for t in own if not t.once or done[name] == runs[name]]
    return tuple(out)


def message_call(transfer: Transfer) -> CollectiveCall:
    """What a transfer asks of the network: a permute of bytes with one pair of stages."""
    return CollectiveCall(
        kind="collective_permute",
        axes=(STAGE_AXIS,),
        dtype=DType.U8,
        source_shape=(1, transfer.num_bytes, 1),
        name=transfer.received,
        pairs=((transfer.source, transfer.target),),
    )
