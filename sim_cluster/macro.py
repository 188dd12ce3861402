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
from compiler.isa.program import Call, CollectiveCall, Engine, Function, Program, Repeat
from compiler.neff.schedule import STAGE_AXIS, Schedule, Transfer, flat, run_counts
from compiler.target import PS_PER_S, Target
from sim_cluster.contention import NO_DEMAND, Demand

HALF_SHARE = 0.5
"""Share of a resource at which stretches are evaluated besides all of it; durations between are
interpolated."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Compute between collective events, with its duration at a few shares of what it contends for.

    `full_ps`: all DMA engines of the core and its even part of an HBM bank of `bank_cores`.
    `half_ps`: half of the engines and no limit by HBM; `bank_ps`: the whole bank; `scarce_ps`: half
    of the even part; 0 where HBM makes no difference. `demand` is what it takes on average.
    """

    full_ps: int
    half_ps: int
    compute_ps: int  # time with any compute engine busy
    segment: Segment
    label: str
    charge: str = ""  # what all of it is charged to; empty: compute, the rest of the time memory
    bank_ps: int = 0
    scarce_ps: int = 0
    bank_cores: int = 1
    demand: Demand = NO_DEMAND

    def duration_ps(self, dma_share: float, hbm_share: float = 1.0) -> float:
        """Duration at a share of the DMA engines and of HBM (1: the even part), whichever is
        scarcer.

        Between the evaluated points speed is linear in the share: a collective costs code the time
        of the engines and of HBM that it takes, as far as code waits for them, however fast it
        moves its bytes.
        """
        least = self.bank_ps or self.full_ps
        dma = _scarcer(dma_share, least, self.half_ps)
        if hbm_share <= 1:
            return max(dma, _scarcer(hbm_share, self.full_ps, self.scarce_ps))
        over = (hbm_share - 1) / (self.bank_cores - 1) if hbm_share < self.bank_cores else 1.0
        return max(dma, self.full_ps * least / (least + over * (self.full_ps - least) or 1))


def _scarcer(share: float, whole_ps: int, half_ps: int) -> float:
    """Duration at a share up to 1 of a resource, of which half makes it `half_ps`."""
    lost = (1 - whole_ps / max(half_ps, whole_ps, 1)) / (1 - HALF_SHARE) * (1 - share)
    return whole_ps / max(1 - lost, share)


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


@dataclass(frozen=True, slots=True)
class Mark:
    """A run of a program begins; an empty name: it has ended. Takes no time."""

    name: str


MacroOp = Stretch | Start | Wait | Send | Receive | Mark


def function_macros(function: Function, target: Target) -> tuple[MacroOp, ...]:
    """The macro-operations of one call of `function`."""
    out: list[MacroOp] = []
    for own, *others in zip(*_evaluated(function, target), strict=True):
        if own.kind == "compute":
            out += _stretches(own, others, function.name, target)
        elif own.kind == "start":
            out.append(Start(function.collectives[own.collective], own.collective))
        else:
            out.append(Wait(own.collective))
    return tuple(out)


def _evaluated(function: Function, target: Target) -> list[tuple[Segment, ...]]:
    """Segments at an even part of HBM; with half of the DMA engines and the whole bank; with the
    whole bank; with half of the even part.
    """
    whole = float(target.cores_per_bank)
    return [
        function_segments(function, target),
        function_segments(function, target, HALF_SHARE, whole, recorded=False),
        function_segments(function, target, 1.0, whole, recorded=False),
        function_segments(function, target, 1.0, HALF_SHARE, recorded=False),
    ]


def _stretches(
    own: Segment, others: Sequence[Segment], label: str, target: Target
) -> Iterator[Stretch]:
    """A segment as stretches of regions that lose about as much with half of the DMA engines: what
    a collective costs depends on the code it runs beside.
    """
    groups = groupby(_paired(own, others), key=_sensitivity)
    for regions in (list(group) for _, group in groups):
        (segment,) = joined([points[0] for points in regions])
        half, bank, scarce = (
            sum(points[n].duration_ps for points in regions) for n in range(1, len(others) + 1)
        )
        yield Stretch(
            segment.duration_ps,
            max(half, bank),
            segment.compute_ps,
            segment,
            label,
            bank_ps=min(bank, segment.duration_ps),
            scarce_ps=max(scarce, segment.duration_ps),
            bank_cores=target.cores_per_bank,
            demand=_demand(segment, bank, target),
        )


def _demand(segment: Segment, bank_ps: int, target: Target) -> Demand:
    """What code takes of DMA engines and HBM when nothing and nobody shares them with it."""
    dma_ps = sum(segment.busy_ps.get(queue.value, 0) for queue in (Engine.DMA_IN, Engine.DMA_OUT))
    hbm_ps = segment.hbm_bytes / target.hbm_bytes_per_s_per_core * PS_PER_S
    alone_ps = max(bank_ps, 1) * target.lnc
    return Demand(min(1.0, dma_ps / alone_ps), hbm=hbm_ps / alone_ps)


def _paired(own: Segment, others: Sequence[Segment]) -> list[tuple[RegionTime, ...]]:
    """The regions at every point; all of them as one when physical cores do not meet at the same
    ones.
    """
    points = (own, *others)
    names = [[r.name for r in point.regions] for point in points]
    if all(found == names[0] for found in names):
        return list(zip(*(point.regions for point in points), strict=True))
    return [tuple(_whole(point) for point in points)]


def _whole(segment: Segment) -> RegionTime:
    return RegionTime(
        segment.regions[0].name,
        segment.duration_ps,
        segment.busy_ps,
        segment.compute_ps,
        segment.hbm_bytes,
        segment.lone_ps,
    )


def _sensitivity(points: Sequence[RegionTime]) -> int:
    """How much of its time a region adds with half of the DMA engines, in quarters."""
    return round(4 * (points[1].duration_ps / max(points[0].duration_ps, 1) - 1))


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
        number = done[name]
        done[name] += 1
        own = [t for t in transfers if (t.target, t.reader) == (stage, name)]
        out += [Receive(message_call(t)) for t in own if not t.once or done[name] == 1]
        out += [Mark(f"{name} {number}" if runs[name] > 1 else name), *macros[name], Mark("")]
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
