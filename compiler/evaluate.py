"""Time of compiled functions on one core: instruction costs at given rates, evaluated by
`max_plus.py`.

Shares scale what a core contends for: `dma_share` the rate of the DMA queues, `hbm_share` the HBM
bandwidth. Busy times and bytes are sums over the code; only clocks need evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from compiler.isa.costs import instr_interval_ps
from compiler.isa.program import Engine, Function, Instr, Loop, Region, Space
from compiler.isa.region import Tensor
from compiler.max_plus import QUEUE, Timed, TimedLoop, Timeline, timed_loop
from compiler.target import PS_PER_S, CoreModel, Target

_DMA = (Engine.DMA_IN, Engine.DMA_OUT)
_COMPUTE = (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)


@dataclass(frozen=True, slots=True)
class RegionTime:
    """One region: duration, busy time per engine, time with any compute engine busy, bytes through
    HBM; `lone_ps` of the duration one physical core works while the other has no part in it."""

    name: str
    duration_ps: int
    busy_ps: Mapping[str, int]
    compute_ps: int
    hbm_bytes: int
    lone_ps: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a function between collective events.

    kind `compute`: regions back to back. kind `start` and `wait`: collective number `collective` of
    the function.
    """

    kind: str
    duration_ps: int = 0
    compute_ps: int = 0
    busy_ps: Mapping[str, int] = field(default_factory=dict)
    hbm_bytes: int = 0
    collective: int = -1
    regions: tuple[RegionTime, ...] = ()

    @property
    def lone_ps(self) -> int:
        """Time in which one physical core has no part in what the other one does."""
        return sum(r.lone_ps for r in self.regions)


class _Totals:
    """What a region's code adds up to, whatever waits for what."""

    def __init__(self) -> None:
        self.busy = dict.fromkeys(Engine, 0)
        self.hbm_bytes = 0

    @property
    def dma_ps(self) -> int:
        """Loads and stores are separate queues but share the DMA engines."""
        return sum(self.busy[e] for e in _DMA)


@dataclass(frozen=True, slots=True)
class _Rates:
    """A core at given shares of what it contends for."""

    core: CoreModel
    hbm_bytes_per_s: float
    dma_share: float

    def timed(
        self, instr: Instr, region: Region, tensors: Sequence[Tensor], recorded: bool
    ) -> Timed:
        """Costs of an instruction; intervals of compute engines are kept when `recorded`."""
        queue, waits, signals = QUEUE[instr.engine], instr.waits, instr.signals
        if instr.opcode in ("wait", "signal"):
            return Timed(queue, 0, 0, waits, signals)
        interval = instr_interval_ps(instr, region.tiles, tensors, self.core)
        if instr.engine in _DMA:
            floor = round(_hbm_bytes(instr, tensors) / self.hbm_bytes_per_s * PS_PER_S)
            interval = max(round(interval / self.dma_share), floor)
            return Timed(queue, interval, self.core.dma_fixed_ps, waits, signals)
        hertz = self.core.clock_hz[instr.engine.value]
        latency = self.core.compute_latency_cycles * PS_PER_S // hertz
        latency += self.core.semaphore_ps if signals else 0
        kept = recorded and interval > 0 and instr.engine in _COMPUTE
        return Timed(queue, interval, latency, waits, signals, kept)


@dataclass(frozen=True, slots=True)
class _Timing:
    """The costs of a region's code; `totals` is what the code that was seen adds up to."""

    region: Region
    tensors: Sequence[Tensor]
    rates: _Rates
    recorded: bool
    totals: _Totals = field(default_factory=_Totals)

    def body(self, items: Sequence[Instr | Loop], times: int = 1) -> list[Timed | TimedLoop]:
        """Instructions and loops that run `times` times, with their costs."""
        out: list[Timed | TimedLoop] = []
        for item in items:
            if isinstance(item, Loop):
                out.append(timed_loop(item.trip, self.body(item.body, times * item.trip)))
                continue
            timed = self.rates.timed(item, self.region, self.tensors, self.recorded)
            self.totals.busy[item.engine] += times * timed.interval_ps
            if timed.interval_ps and item.engine in _DMA:
                self.totals.hbm_bytes += times * _hbm_bytes(item, self.tensors)
            out.append(timed)
        return out


def _hbm_bytes(instr: Instr, tensors: Sequence[Tensor]) -> int:
    """Bytes an instruction reads from and writes to HBM."""
    moved = 0
    for pattern in (instr.dst, *instr.srcs):
        if pattern is not None and pattern.space is Space.HBM:
            elements = 1
            for size in instr.dst.shape if instr.dst else ():
                elements *= size
            moved += elements * tensors[pattern.buffer].dtype.bytes
    return moved


def instr_cost(
    instr: Instr, region: Region, tensors: Sequence[Tensor], target: Target
) -> tuple[int, int]:
    """(initiation interval, latency after it) of one instruction that signals; ps."""
    rates = _Rates(target.core, target.hbm_bytes_per_s_per_core, 1.0)
    timed = rates.timed(replace(instr, signals=(0,)), region, tensors, recorded=False)
    return timed.interval_ps, timed.latency_ps


def region_time(
    region: Region,
    tensors: Sequence[Tensor],
    target: Target,
    dma_share: float = 1.0,
    hbm_share: float = 1.0,
    recorded: bool = True,
) -> RegionTime:
    """Time of one region from barrier to barrier; `compute_ps` is 0 unless `recorded`.

    The duration is at least the summed time of loads and stores. What it is above the time of the
    busiest engine, neighbours fill as far as the core's `stall_recovery` says.
    """
    rates = _Rates(target.core, target.hbm_bytes_per_s_per_core * hbm_share, dma_share)
    timeline, totals = _evaluated(region, tensors, rates, recorded)
    duration = max(timeline.end_ps, totals.dma_ps)
    busiest = max(totals.dma_ps, *(totals.busy[e] for e in _COMPUTE))
    duration -= round(target.core.stall_recovery * (duration - busiest))
    compute = min(duration, timeline.recorded_ps)
    busy = {e.value: t for e, t in totals.busy.items() if t}
    return RegionTime(region.program.name, duration, busy, compute, totals.hbm_bytes)


def region_duration_ps(region: Region, tensors: Sequence[Tensor], target: Target) -> int:
    """The duration alone, for those who compare many tilings."""
    return region_time(region, tensors, target, recorded=False).duration_ps


def _evaluated(
    region: Region, tensors: Sequence[Tensor], rates: _Rates, recorded: bool
) -> tuple[Timeline, _Totals]:
    timing = _Timing(region, tensors, rates, recorded)
    timeline = Timeline(region.tokens)
    timeline.run(timing.body(region.body))
    return timeline, timing.totals


def function_segments(
    function: Function,
    target: Target,
    dma_share: float = 1.0,
    hbm_share: float = 1.0,
    recorded: bool = True,
) -> tuple[Segment, ...]:
    """The function as compute stretches between collective starts and waits; arguments as in
    `region_time`.

    Physical cores of a logical one run side by side: busy times and bytes are sums over them, the
    duration is that of the slower one.
    """
    out: list[Segment] = []
    pending = _Pair(target.core.semaphore_ps, len(function.subgraphs))
    for number, regions in enumerate(zip(*function.subgraphs, strict=True)):
        first = regions[0].program
        if first.kind in ("collective_start", "collective_wait"):
            out += joined(pending.taken(number + 1))
            kind = first.kind.removeprefix("collective_")
            out.append(Segment(kind, collective=first.attrs["collective"]))
            continue
        shares = dma_share, hbm_share * _bank_share(regions)
        times = [_timed_region(r, function.tensors, target, shares, recorded) for r in regions]
        pending.add(regions, times)
    return tuple(out + joined(pending.taken(0)))


def _bank_share(regions: Sequence[Region]) -> int:
    """Physical cores share an HBM bank (documented for trn2: one 24 GiB bank per two cores): a core
    whose partner is idle has all of its bandwidth (inferred).
    """
    return len(regions) if any(r.program.kind == "idle" for r in regions) else 1


def _timed_region(
    region: Region,
    tensors: Sequence[Tensor],
    target: Target,
    shares: tuple[float, float],
    recorded: bool,
) -> RegionTime:
    match region.program.kind:
        case "register_load":
            return RegionTime(region.program.name, target.core.dma_fixed_ps, {}, 0, 4)
        case "idle":
            return RegionTime(region.program.name, 0, {}, 0, 0)
    return region_time(region, tensors, target, *shares, recorded)


class _Pair:
    """The clocks of the physical cores between two collectives, and what they did together.

    Every physical core runs its regions in order; a region that waits for the other core starts
    after it, one semaphore later.
    """

    def __init__(self, semaphore_ps: int, cores: int) -> None:
        self.semaphore_ps = semaphore_ps
        self.first = 0  # number of the first region of the stretch
        self.ends: list[list[int]] = [[] for _ in range(cores)]  # of the regions of each core
        self.times: list[RegionTime] = []

    def add(self, regions: Sequence[Region], times: Sequence[RegionTime]) -> None:
        """One region of every core."""
        before = self._now()
        for core, (region, time) in enumerate(zip(regions, times, strict=True)):
            start = self.ends[core][-1] if self.ends[core] else 0
            awaited = region.after - self.first
            if awaited > 0:
                start = max(start, self.ends[1 - core][awaited - 1] + self.semaphore_ps)
            self.ends[core].append(start + time.duration_ps)
        together = _together(times, self._now() - before)
        lone = any(r.program.kind == "idle" for r in regions)
        self.times.append(replace(together, lone_ps=together.duration_ps) if lone else together)

    def taken(self, first: int) -> list[RegionTime]:
        """Everything so far; both cores are at the same point then. `first` is the next region."""
        found, cores = self.times, len(self.ends)
        self.first, self.ends, self.times = first, [[] for _ in range(cores)], []
        return found

    def _now(self) -> int:
        return max(ends[-1] if ends else 0 for ends in self.ends)


def _together(times: Sequence[RegionTime], duration_ps: int) -> RegionTime:
    """One region of every core as one. Halves run the same code side by side, so the time with any
    compute engine busy is that of the busier one.
    """
    busy: dict[str, int] = {}
    for time in times:
        for engine, ps in time.busy_ps.items():
            busy[engine] = busy.get(engine, 0) + ps
    compute = min(duration_ps, max(t.compute_ps for t in times))
    return RegionTime(times[0].name, duration_ps, busy, compute, sum(t.hbm_bytes for t in times))


def joined(regions: Sequence[RegionTime]) -> list[Segment]:
    """Regions back to back as a compute segment; none of no regions."""
    if not regions:
        return []
    busy: dict[str, int] = {}
    for region in regions:
        for engine, ps in region.busy_ps.items():
            busy[engine] = busy.get(engine, 0) + ps
    return [
        Segment(
            "compute",
            sum(r.duration_ps for r in regions),
            sum(r.compute_ps for r in regions),
            busy,
            sum(r.hbm_bytes for r in regions),
            -1,
            tuple(regions),
        )
    ]
