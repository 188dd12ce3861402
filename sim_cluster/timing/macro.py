"""Programs as macro-operations: compute stretches (launches among them), collective starts and
waits.

A program's functions are timed once each by the evaluator at a few shares of the DMA engines; calls
and layer loops only repeat the resulting stretches. The cluster loop (`run_timing.py`) replays the
list of every class of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.instructions import DMA
from shardwright.compiler.isa.program import Call, CollectiveCall, Function, Program, Repeat
from shardwright.compiler.machine.target import PS_PER_S, Target
from shardwright.compiler.neff.schedule import STAGE_AXIS, Schedule, Transfer
from shardwright.compiler.timing.evaluate import Segment, Shares, segments_at
from shardwright.sim_cluster.timing.contention import NO_DEMAND, Demand
from shardwright.sim_cluster.timing.stage_order import runs_of

HALF_SHARE = 0.5
"""Share of a resource at which stretches are evaluated besides all of it; durations between are
interpolated."""
Place = tuple[str, int]
"""A program, and the number of one of its functions; -1 is its launch."""
NOWHERE = ("", -1)
"""Outside of programs, where stages of a pipeline wait for messages."""


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
    place: Place = NOWHERE

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
    place: Place = NOWHERE


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


Segments = Sequence[tuple[Segment, ...]]
Evaluate = Callable[[Function, Target], Segments]


def evaluated(function: Function, target: Target) -> Segments:
    """Segments at an even part of HBM; with half of the DMA engines and the whole bank; with the
    whole bank; with half of the even part."""
    whole = float(target.cores_per_bank)
    points = (Shares(), Shares(HALF_SHARE, whole), Shares(hbm=whole), Shares(hbm=HALF_SHARE))
    return segments_at(function, target, points)


def function_macros(
    function: Function, target: Target, place: Place = NOWHERE, evaluate: Evaluate = evaluated
) -> tuple[MacroOp, ...]:
    """The macro-operations of one call of `function`, which is at `place`; `evaluate` gives
    what `evaluated` does."""
    own, *others = evaluate(function, target)
    code = _Code.of(own, others, target)
    out: list[MacroOp] = []
    for segment in own:
        if segment.kind == "compute":
            stretch = code.stretch(segment, function.name, target.cores_per_bank)
            out.append(replace(stretch, place=place))
        elif segment.kind == "start":
            out.append(Start(function.collectives[segment.collective], segment.collective))
        else:
            out.append(Wait(segment.collective, place))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class _Code:
    """The code of a function that moves data, as one: how many times as long as beside an even part
    of HBM it takes at the other points, and what it wants when nobody shares anything with it.

    What a collective takes costs code the same wherever in the function it meets it. If it cost
    more in front of a product than in front of an attention, a collective could save time by being
    slow; and ranks are never so exactly in step that it is known which kernel meets it.
    """

    half: float
    bank: float
    scarce: float
    demand: Demand

    @classmethod
    def of(
        cls, own: Sequence[Segment], others: Sequence[Sequence[Segment]], target: Target
    ) -> _Code:
        """Of the segments of a function at all points."""
        moving = [n for n, segment in enumerate(own) if segment.hbm_bytes]
        even, half, bank, scarce = (
            sum(point[n].duration_ps for n in moving) for point in (own, *others)
        )
        if not even:
            return _MOVES_NOTHING
        dma_ps = sum(own[n].busy_ps.get(queue.value, 0) for n in moving for queue in DMA)
        hbm_bytes = sum(own[n].hbm_bytes for n in moving)
        hbm_ps = hbm_bytes / target.hbm_bytes_per_s_per_core * PS_PER_S
        bank = min(bank, even)
        alone_ps = bank * target.lnc
        demand = Demand(min(1.0, dma_ps / alone_ps), hbm=hbm_ps / alone_ps)
        # Who wants nothing of the engines is left nothing of them in a fight, and loses nothing.
        half = max(half, bank) if demand.dma else bank
        return cls(half / even, bank / even, max(scarce, even) / even, demand)

    def stretch(self, segment: Segment, label: str, bank_cores: int) -> Stretch:
        """A segment of the function; one that moves nothing loses and wants nothing."""
        code = self if segment.hbm_bytes else _MOVES_NOTHING
        even = segment.duration_ps
        return Stretch(
            even,
            round(even * code.half),
            segment.compute_ps,
            segment,
            label,
            bank_ps=round(even * code.bank),
            scarce_ps=round(even * code.scarce),
            bank_cores=bank_cores,
            demand=code.demand,
        )


_MOVES_NOTHING = _Code(1.0, 1.0, 1.0, NO_DEMAND)


def program_macros(
    program: Program, target: Target, evaluate: Evaluate = evaluated
) -> tuple[MacroOp, ...]:
    """The whole program: a launch, then every call in order, loops expanded; `evaluate` as in
    `function_macros`."""
    functions = enumerate(program.functions)
    bodies = [function_macros(f, target, (program.name, n), evaluate) for n, f in functions]
    return (_launch(program.name, target), *_steps(program.steps, bodies))


def _launch(name: str, target: Target) -> Stretch:
    """The host starts a program on the core."""
    ps = target.core.program_start_ps
    label, place = f"launch {name}", (name, -1)
    return Stretch(ps, ps, 0, Segment("compute", ps), label, "launch", place=place)


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
    before and sends after. `macros` are those of the programs by name."""
    out: list[MacroOp] = []
    for run in runs_of(schedule, transfers, stage):
        out += [Receive(message_call(t)) for t in run.received]
        out += [Mark(run.label), *macros[run.program], Mark("")]
        out += [Send(message_call(t)) for t in run.sent]
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
