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
    HBM."""

    name: str
    duration_ps: int
    busy_ps: Mapping[str, int]
    compute_ps: int
    hbm_bytes: int


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


def _timed(
    region: Region, tensors: Sequence[Tensor], rates: _Rates, recorded: bool
) -> tuple[list[Timed | TimedLoop], _Totals]:
    """The code of a region with its costs, and what it adds up to."""
    totals = _Totals()

    def body(items: Sequence[Instr | Loop], times: int) -> list[Timed | TimedLoop]:
        out: list[Timed | TimedLoop] = []
        for item in items:
            if isinstance(item, Loop):
                out.append(timed_loop(item.trip, body(item.body, times * item.trip)))
                continue
            timed = rates.timed(item, region, tensors, recorded)
            totals.busy[item.engine] += times * timed.interval_ps
            if timed.interval_ps and item.engine in _DMA:
                totals.hbm_bytes += times * _hbm_bytes(item, tensors)
            out.append(timed)
        return out

    return body(region.body, 1), totals


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

    The duration is at least the summed time of loads and stores.
    """
    rates = _Rates(target.core, target.hbm_bytes_per_s_per_core * hbm_share, dma_share)
    timeline, totals = _evaluated(region, tensors, rates, recorded)
    duration = max(timeline.end_ps, totals.dma_ps)
    compute = min(duration, timeline.recorded_ps)
    busy = {e.value: t for e, t in totals.busy.items() if t}
    return RegionTime(region.program.name, duration, busy, compute, totals.hbm_bytes)


def region_duration_ps(region: Region, tensors: Sequence[Tensor], target: Target) -> int:
    """The duration alone, for those who compare many tilings."""
    return region_time(region, tensors, target, recorded=False).duration_ps


def _evaluated(
    region: Region, tensors: Sequence[Tensor], rates: _Rates, recorded: bool
) -> tuple[Timeline, _Totals]:
    body, totals = _timed(region, tensors, rates, recorded)
    timeline = Timeline(region.tokens)
    timeline.run(body)
    return timeline, totals


def function_segments(
    function: Function,
    target: Target,
    dma_share: float = 1.0,
    hbm_share: float = 1.0,
    recorded: bool = True,
) -> tuple[Segment, ...]:
    """The function as compute stretches between collective starts and waits; arguments as in
    `region_time`.
    """
    tensors = function.tensors
    out: list[Segment] = []
    pending: list[RegionTime] = []
    for region in function.regions:
        kind = region.program.kind
        if kind in ("collective_start", "collective_wait"):
            out += _joined(pending)
            pending = []
            collective = region.program.attrs["collective"]
            out.append(Segment(kind.removeprefix("collective_"), collective=collective))
        elif kind == "register_load":
            pending.append(RegionTime(region.program.name, target.core.dma_fixed_ps, {}, 0, 4))
        else:
            pending.append(region_time(region, tensors, target, dma_share, hbm_share, recorded))
    return tuple(out + _joined(pending))


def _joined(regions: Sequence[RegionTime]) -> list[Segment]:
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
