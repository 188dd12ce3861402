"""Time of compiled functions on one core: program-order max-plus evaluation with loop folding.

Engines are in-order queues and every wait names its token, so the start of an instruction is the
maximum of its queue's clock and its tokens' times: one pass in program order is exact for queues
that do not share a rate. A loop whose whole state (every clock and every token it touches) moves by
the same amount over one, two or four iterations is in its periodic regime, and the rest of it is a
multiplication. Comparing end times alone would be wrong: a prefetching DMA queue drifts relative to
the tensor engine. `tests/support/event_heap.py` is the oracle.

Shares scale what a core contends for: `dma_share` the rate of the DMA queues, `hbm_share` the HBM
bandwidth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from compiler.isa.costs import instr_interval_ps
from compiler.isa.program import Engine, Function, Instr, Loop, Region, Space
from compiler.isa.region import Tensor
from compiler.target import PS_PER_S, CoreModel, Target

_PERIODS = (1, 2, 4)
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


@dataclass(frozen=True, slots=True)
class _Timed:
    """An instruction with its costs."""

    engine: Engine
    interval_ps: int
    latency_ps: int
    waits: tuple[int, ...]
    signals: tuple[int, ...]
    hbm_bytes: int


@dataclass(frozen=True, slots=True)
class _TimedLoop:
    trip: int
    body: tuple[_Timed | _TimedLoop, ...]
    engines: tuple[Engine, ...]
    semaphores: tuple[int, ...]


class _State:
    """Clocks and tokens of one region, and what was counted so far."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.clock = dict.fromkeys(Engine, 0)
        self.done = dict.fromkeys(Engine, 0)  # completion of the last instruction of each queue
        self.tokens = [deque([0] * n) for n in tokens]
        self.busy = dict.fromkeys(Engine, 0)
        self.hbm_bytes = 0
        self.intervals: list[tuple[int, int]] = []  # compute engines busy
        self.folded_compute_ps = 0

    def run(self, body: Sequence[_Timed | _TimedLoop]) -> None:
        for item in body:
            if isinstance(item, _TimedLoop):
                self.loop(item)
            else:
                self.issue(item)

    def issue(self, i: _Timed) -> None:
        start = self.clock[i.engine]
        for semaphore in i.waits:
            start = max(start, self.tokens[semaphore].popleft())
        end = start + i.interval_ps
        self.clock[i.engine] = end
        finished = max(self.done[i.engine], end + i.latency_ps)
        self.done[i.engine] = finished
        for semaphore in i.signals:
            self.tokens[semaphore].append(finished)
        if i.interval_ps:
            self.busy[i.engine] += i.interval_ps
            self.hbm_bytes += i.hbm_bytes
            if i.engine in _COMPUTE:
                self.intervals.append((start, end))

    def loop(self, loop: _TimedLoop) -> None:
        history: list[_Snapshot] = []
        done = 0
        while done < loop.trip:
            history.append(_Snapshot(self, loop))
            period, shift = _periodic(history)
            left = loop.trip - done
            if period and left >= period:
                repeats = left // period
                self.advance(loop, history[-1 - period], repeats, shift)
                done += repeats * period
                history = []
                for _ in range(left - repeats * period):
                    self.run(loop.body)
                return
            self.run(loop.body)
            done += 1

    def advance(self, loop: _TimedLoop, before: _Snapshot, repeats: int, shift: int) -> None:
        """Repeat the last period `repeats` times: everything the loop touches moves by `repeats *
        shift`."""
        for engine in Engine:
            self.busy[engine] += repeats * (self.busy[engine] - before.busy[engine])
        self.hbm_bytes += repeats * (self.hbm_bytes - before.hbm_bytes)
        explicit = _wrapped_union(self.intervals[before.num_intervals :], shift)
        inner = self.folded_compute_ps - before.folded_compute_ps
        self.folded_compute_ps += repeats * min(shift, explicit + inner)
        for engine in loop.engines:
            self.clock[engine] += repeats * shift
            self.done[engine] += repeats * shift
        for semaphore in loop.semaphores:
            tokens = self.tokens[semaphore]
            self.tokens[semaphore] = deque(t + repeats * shift for t in tokens)


class _Snapshot:
    """State that a loop touches, and the counters, before an iteration."""

    __slots__ = ("busy", "folded_compute_ps", "hbm_bytes", "num_intervals", "times")

    def __init__(self, state: _State, loop: _TimedLoop) -> None:
        clocks = [t for e in loop.engines for t in (state.clock[e], state.done[e])]
        tokens = [tuple(state.tokens[s]) for s in loop.semaphores]
        self.times = (tuple(clocks), *tokens)
        self.busy = dict(state.busy)
        self.hbm_bytes = state.hbm_bytes
        self.num_intervals = len(state.intervals)
        self.folded_compute_ps = state.folded_compute_ps


def _periodic(history: Sequence[_Snapshot]) -> tuple[int, int]:
    """(period, shift) when the last period moved the whole state by one amount, else (0, 0)."""
    for period in _PERIODS:
        if len(history) > period:
            shift = _uniform_shift(history[-1 - period].times, history[-1].times)
            if shift is not None:
                return period, shift
    return 0, 0


def _uniform_shift(
    before: tuple[tuple[int, ...], ...], after: tuple[tuple[int, ...], ...]
) -> int | None:
    shift: int | None = None
    for old, new in zip(before, after, strict=True):
        if len(old) != len(new):
            return None
        for a, b in zip(old, new, strict=True):
            if shift is None:
                shift = b - a
            elif b - a != shift:
                return None
    return shift


def _union(intervals: Sequence[tuple[int, int]]) -> int:
    """Length of the union."""
    total, reach = 0, -1
    for start, end in sorted(intervals):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total


def _wrapped_union(intervals: Sequence[tuple[int, int]], period: int) -> int:
    """Length of the union of one period of a periodic pattern: intervals wrap around."""
    if period <= 0:
        return 0
    pieces = []
    for start, end in intervals:
        if end - start >= period:
            return period
        low, high = start % period, start % period + end - start
        pieces.append((low, min(high, period)))
        if high > period:
            pieces.append((0, high - period))
    return _union(pieces)


def _timed(
    body: Sequence[Instr | Loop], region: Region, tensors: Sequence[Tensor], rates: _Rates
) -> tuple[_Timed | _TimedLoop, ...]:
    out: list[_Timed | _TimedLoop] = []
    for item in body:
        if isinstance(item, Instr):
            out.append(rates.timed(item, region, tensors))
            continue
        inner = _timed(item.body, region, tensors, rates)
        engines = {e for i in inner for e in ((i.engine,) if isinstance(i, _Timed) else i.engines)}
        semaphores = {
            s
            for i in inner
            for s in (i.waits + i.signals if isinstance(i, _Timed) else i.semaphores)
        }
        order = tuple(e for e in Engine if e in engines)
        out.append(_TimedLoop(item.trip, inner, order, tuple(sorted(semaphores))))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class _Rates:
    """A core at given shares of what it contends for."""

    core: CoreModel
    hbm_bytes_per_s: float
    dma_share: float

    def timed(self, instr: Instr, region: Region, tensors: Sequence[Tensor]) -> _Timed:
        interval = instr_interval_ps(instr, region.tiles, tensors, self.core)
        waits, signals = instr.waits, instr.signals
        if instr.opcode in ("wait", "signal"):
            return _Timed(instr.engine, 0, 0, waits, signals, 0)
        if instr.engine in _DMA:
            moved = _hbm_bytes(instr, tensors)
            floor = round(moved / self.hbm_bytes_per_s * PS_PER_S)
            interval = max(round(interval / self.dma_share), floor)
            return _Timed(instr.engine, interval, self.core.dma_fixed_ps, waits, signals, moved)
        hertz = self.core.clock_hz[instr.engine.value]
        latency = self.core.compute_latency_cycles * PS_PER_S // hertz
        latency += self.core.semaphore_ps if signals else 0
        return _Timed(instr.engine, interval, latency, waits, signals, 0)


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
    timed = rates.timed(replace(instr, signals=(0,)), region, tensors)
    return timed.interval_ps, timed.latency_ps


def region_time(
    region: Region,
    tensors: Sequence[Tensor],
    target: Target,
    dma_share: float = 1.0,
    hbm_share: float = 1.0,
) -> RegionTime:
    """Time of one region from barrier to barrier.

    Loads and stores are separate queues but share the DMA engines: the duration is at least their
    summed time.
    """
    rates = _Rates(target.core, target.hbm_bytes_per_s_per_core * hbm_share, dma_share)
    state = _State(region.tokens)
    state.run(_timed(region.body, region, tensors, rates))
    both_queues = sum(state.busy[e] for e in _DMA)
    duration = max(*state.clock.values(), *state.done.values(), both_queues)
    compute = min(duration, _union(state.intervals) + state.folded_compute_ps)
    busy = {e.value: t for e, t in state.busy.items() if t}
    return RegionTime(region.program.name, duration, busy, compute, state.hbm_bytes)


def function_segments(
    function: Function, target: Target, dma_share: float = 1.0, hbm_share: float = 1.0
) -> tuple[Segment, ...]:
    """The function as compute stretches between collective starts and waits."""
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
            pending.append(region_time(region, function.tensors, target, dma_share, hbm_share))
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
