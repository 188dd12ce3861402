"""Time of compiled functions on one core: instruction costs at given rates, evaluated by
`max_plus.py`.

Shares scale what a core contends for, the rate of the DMA queues and the HBM bandwidth; code is
costed once for any number of them. Busy times and bytes are sums over the code; only clocks need
evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardwright.compiler.isa.costs import instr_interval_ps
from shardwright.compiler.isa.kernel import Tensor
from shardwright.compiler.isa.program import Engine, Function, Instr, Kernel, Loop, Space
from shardwright.compiler.machine.target import PS_PER_S, CoreModel, Target
from shardwright.compiler.timing.core_timeline import DMA, CoreTimeline
from shardwright.compiler.timing.max_plus import QUEUE, Timed, TimedLoop, timed_loop

Made = TypeVar("Made")
_TOKENS = ("wait", "signal")
_EVENTS = ("collective_start", "collective_wait")
_COMPUTE = (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)

ORACLE_RECOVERY = 0.5
"""Part of a kernel's stalls that its neighbours are taken to fill when code is chosen: the middle
of what they may do (our choice, docs/design/0061). At 0 code wins that waits less and works more,
which a step that fills stalls pays for; at 1 code that only waits costs nothing.
"""

ORACLE_DMA = 0.75
"""Share of the DMA queues that code has when it is chosen: the middle between all of them and the
half that is left beside collectives (our choice, docs/design/0073). At 1 code wins that moves more
to compute less, which a step that hides its collectives behind it pays for.
"""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel: duration, busy time per engine, time with any compute engine busy, bytes through
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

    kind `compute`: kernels back to back. kind `start` and `wait`: collective number `collective` of
    the function.
    """

    kind: str
    duration_ps: int = 0
    compute_ps: int = 0
    busy_ps: Mapping[str, int] = field(default_factory=dict)
    hbm_bytes: int = 0
    collective: int = -1
    kernels: tuple[KernelTime, ...] = ()

    @property
    def lone_ps(self) -> int:
        """Time in which one physical core has no part in what the other one does."""
        return sum(k.lone_ps for k in self.kernels)


@dataclass(frozen=True, slots=True)
class Shares:
    """Of what a core contends for: the rate of its DMA queues, and its bandwidth of HBM."""

    dma: float = 1.0
    hbm: float = 1.0


class _Costs:
    """A kernel's code with its costs at several shares (`bodies`), and what it adds up to at each,
    whatever waits for what. Only DMA differs between shares. `recorded`: intervals of compute
    engines are kept at the first.
    """

    def __init__(
        self,
        kernel: Kernel,
        tensors: Sequence[Tensor],
        target: Target,
        points: Sequence[Shares],
        recorded: bool,
    ) -> None:
        self.kernel, self.tensors, self.core = kernel, tensors, target.core
        rate = target.hbm_bytes_per_s_per_core
        self.rates = [(point.dma, rate * point.hbm) for point in points]
        self.recorded = recorded
        cycles = self.core.compute_latency_cycles
        clocks = {Engine(name): hz for name, hz in self.core.clock_hz.items() if hz}
        self.latency_ps = {engine: int(cycles * PS_PER_S // hz) for engine, hz in clocks.items()}
        self.busy = [dict.fromkeys(Engine, 0) for _ in points]
        self.moves: list[list[int]] = [[] for _ in points]  # intervals of DMA instructions
        self.hbm_bytes = 0
        self.is_code = kernel.program.kind == "compute"
        self.bodies = self._costed(kernel.body, 1)

    def _costed(self, items: Sequence[Instr | Loop], times: int) -> list[list[Timed | TimedLoop]]:
        """Instructions and loops that run `times` times with their costs, per point."""
        out: list[list[Timed | TimedLoop]] = [[] for _ in self.rates]
        for item in items:
            costed: Sequence[Timed | TimedLoop]
            if isinstance(item, Loop):
                bodies = self._costed(item.body, times * item.trip)
                loop = timed_loop(item.trip, bodies[0])  # the others differ in costs alone
                costed = [loop._replace(body=tuple(body)) for body in bodies]
            elif item.engine in DMA and item.opcode not in _TOKENS:
                costed = self._dma(item, times)
            else:
                costed = self._compute(item, times)
            for body, timed in zip(out, costed, strict=True):
                body.append(timed)
        return out

    def _dma(self, instr: Instr, times: int) -> list[Timed]:
        whole = instr_interval_ps(instr, self.kernel.tiles, self.tensors, self.core)
        moved = _hbm_bytes(instr, self.tensors)
        out = []
        for n, (share, bytes_per_s) in enumerate(self.rates):
            interval = max(round(whole / share), round(moved / bytes_per_s * PS_PER_S))
            self.busy[n][instr.engine] += times * interval
            self.moves[n].append(interval)
            out.append(_timed(instr, interval, self.core.dma_fixed_ps))
        self.hbm_bytes += times * moved
        return out

    def _compute(self, instr: Instr, times: int) -> list[Timed]:
        if instr.opcode in _TOKENS:
            return [_timed(instr, 0, 0)] * len(self.rates)
        interval = instr_interval_ps(instr, self.kernel.tiles, self.tensors, self.core)
        latency = self.latency_ps[instr.engine]
        latency += self.core.semaphore_ps if instr.signals else 0
        for busy in self.busy:
            busy[instr.engine] += times * interval
        first = _timed(instr, interval, latency, self.recorded)
        return [first, *[first._replace(recorded=False)] * (len(self.rates) - 1)]

    def key(self, point: int) -> object:
        """Equal for points at which the kernel costs the same."""
        return tuple(self.moves[point])

    def time(self, point: int, timeline: CoreTimeline) -> KernelTime:
        """The kernel at one point, as the next of `timeline`."""
        if self.is_code:
            return self.code_time(point, timeline)
        name = self.kernel.program.name
        if self.kernel.program.kind == "idle":
            timeline.ended()
            return KernelTime(name, 0, {}, 0, 0)
        timeline.rest(self.core.dma_fixed_ps)  # register_load
        return KernelTime(name, self.core.dma_fixed_ps, {}, 0, 4)

    def code_time(self, point: int, timeline: CoreTimeline) -> KernelTime:
        """The code at one point, as the next of `timeline`: by how much it moves the end."""
        busy = self.busy[point]
        duration, recorded = timeline.run(
            self.kernel, self.bodies[point], sum(busy[e] for e in DMA)
        )
        of_engines = {e.value: t for e, t in busy.items() if t}
        compute = min(duration, recorded)
        return KernelTime(self.kernel.program.name, duration, of_engines, compute, self.hbm_bytes)

    def busiest_ps(self, point: int) -> int:
        """Busy time of the busiest engine; loads and stores are one."""
        busy = self.busy[point]
        return max(sum(busy[e] for e in DMA), *(busy[e] for e in _COMPUTE))


def _timed(instr: Instr, interval_ps: int, latency_ps: int, recorded: bool = False) -> Timed:
    queue, waits, signals = QUEUE[instr.engine], instr.waits, instr.signals
    return Timed(queue, interval_ps, latency_ps, waits, signals, recorded, instr.borders)


def _recovered(time: KernelTime, busiest_ps: int, stall_recovery: float) -> KernelTime:
    """A kernel of whose duration above that of the busiest engine neighbours fill a share."""
    stall = max(0, time.duration_ps - busiest_ps)
    duration = time.duration_ps - round(stall_recovery * stall)
    return replace(time, duration_ps=duration, compute_ps=min(duration, time.compute_ps))


def _hbm_bytes(instr: Instr, tensors: Sequence[Tensor]) -> int:
    """Bytes an instruction reads from and writes to HBM."""
    patterns = [p for p in (instr.dst, *instr.srcs) if p is not None and p.space is Space.HBM]
    elements = math.prod(instr.dst.shape) if instr.dst else 1
    return sum(elements * tensors[pattern.buffer].dtype.bytes for pattern in patterns)


def instr_costs(
    instrs: Sequence[Instr], kernel: Kernel, tensors: Sequence[Tensor], target: Target
) -> list[tuple[int, int]]:
    """(initiation interval, latency after it) of every instruction, were it to signal; ps."""
    alone = replace(kernel, body=[replace(instr, signals=(0,)) for instr in instrs])
    (body,) = _Costs(alone, tensors, target, (Shares(),), recorded=False).bodies
    return [(t.interval_ps, t.latency_ps) for t in body if isinstance(t, Timed)]


def kernel_times(
    kernel: Kernel,
    tensors: Sequence[Tensor],
    target: Target,
    points: Sequence[Shares],
    recorded: bool = True,
) -> list[KernelTime]:
    """Time of one kernel from barrier to barrier at every point. `compute_ps` is that of the first
    and of points that cost the same, if `recorded`; else 0.
    """
    costs = _Costs(kernel, tensors, target, points, recorded)

    def time(point: int) -> KernelTime:
        alone = costs.code_time(point, CoreTimeline(target.core.semaphore_ps))
        return _recovered(alone, costs.busiest_ps(point), target.core.stall_recovery)

    return _at_each(len(points), costs.key, time)


def _at_each(points: int, key: Callable[[int], object], made: Callable[[int], Made]) -> list[Made]:
    """What is made at every point, once for all points with the same key."""
    keys = [key(point) for point in range(points)]
    known = {one: made(keys.index(one)) for one in dict.fromkeys(keys)}
    return [known[one] for one in keys]


_ORACLE = (Shares(ORACLE_DMA),)
"""Where the cost oracle times kernels."""


def busiest_ps(kernel: Kernel, tensors: Sequence[Tensor], target: Target) -> int:
    """Busy time of the busiest engine of a kernel by the cost oracle: `oracle_ps` is no less,
    whatever waits for what.
    """
    return _Costs(kernel, tensors, target, _ORACLE, recorded=False).busiest_ps(0)


def oracle_ps(kernel: Kernel, tensors: Sequence[Tensor], target: Target) -> int:
    """How long a kernel takes by the cost oracle, which chooses between codes and merges: beside
    neighbours that fill `ORACLE_RECOVERY` of its stalls and leave it `ORACLE_DMA` of the queues.
    """
    costs = _Costs(kernel, tensors, target, _ORACLE, recorded=False)
    alone = costs.code_time(0, CoreTimeline(target.core.semaphore_ps))
    return _recovered(alone, costs.busiest_ps(0), ORACLE_RECOVERY).duration_ps


def function_segments(
    function: Function, target: Target, recorded: bool = True
) -> tuple[Segment, ...]:
    """The function as compute stretches between collective starts and waits; `compute_ps` is 0
    unless `recorded`.
    """
    return segments_at(function, target, (Shares(),), recorded)[0]


def segments_at(
    function: Function, target: Target, points: Sequence[Shares], recorded: bool = True
) -> list[tuple[Segment, ...]]:
    """`function_segments` at every point; `recorded` as in `kernel_times`.

    Physical cores of a logical one run side by side: busy times and bytes are sums over them, the
    duration is that of the slower one.
    """
    coded = list(_coded(function, target, points, recorded))
    return _at_each(
        len(points),
        lambda point: tuple([code.key(point) for codes in coded for code in codes]),
        lambda point: _segments(coded, point, target.core),
    )


def _coded(
    function: Function, target: Target, points: Sequence[Shares], recorded: bool
) -> Iterator[list[_Costs]]:
    """The kernels of all physical cores, step by step.

    The cores share an HBM bank (documented for trn2: one 24 GiB bank per two cores): one whose
    partner is idle has all of its bandwidth (inferred).
    """
    for kernels in zip(*function.subgraphs, strict=True):
        bank = len(kernels) if any(k.program.kind == "idle" for k in kernels) else 1
        shared = [replace(point, hbm=point.hbm * bank) for point in points]
        yield [_Costs(k, function.tensors, target, shared, recorded) for k in kernels]


def _segments(
    coded: Sequence[Sequence[_Costs]], point: int, core: CoreModel
) -> tuple[Segment, ...]:
    """Kernels of every physical core at one point as segments."""
    out: list[Segment] = []
    pending = _Cores(core, len(coded[0]) if coded else 1)
    for number, codes in enumerate(coded):
        first = codes[0].kernel.program
        if first.kind in _EVENTS:
            out += pending.taken(number + 1)
            kind = first.kind.removeprefix("collective_")
            out.append(Segment(kind, collective=first.attrs["collective"]))
        else:
            pending.add(codes, point)
    return tuple(out + pending.taken(0))


@dataclass(frozen=True, slots=True)
class EngineSpan:
    """An engine in a kernel: from when to when since the last collective, and how long it is busy
    in between.
    """

    begin_ps: int
    end_ps: int
    busy_ps: int


def engine_spans(function: Function, target: Target) -> Iterator[list[dict[str, EngineSpan]]]:
    """Per kernel of every physical core what its engines do when, if the core shares nothing; empty
    for kernels without code. Times are those of the queues alone (`stall_recovery` left out).
    """
    pending = _Cores(target.core, len(function.subgraphs))
    for number, codes in enumerate(_coded(function, target, (Shares(),), recorded=False)):
        if codes[0].kernel.program.kind in _EVENTS:
            pending.taken(number + 1)
            yield [{} for _ in codes]
            continue
        pending.add(codes, 0)
        yield [
            {e.value: EngineSpan(*span, code.busy[0][e]) for e, span in timeline.spans.items()}
            if code.is_code
            else {}
            for code, timeline in zip(codes, pending.timelines, strict=True)
        ]


class _Cores:
    """The clocks of the physical cores between two collectives, and what they did together.

    Every physical core runs its kernels in order; a kernel that waits for the other core starts
    after it, one semaphore later.
    """

    def __init__(self, core: CoreModel, cores: int) -> None:
        self.core, self.cores = core, cores
        self._begin(0)

    def add(self, codes: Sequence[_Costs], point: int) -> None:
        """One kernel of every core."""
        before = self._now()
        times = []
        for number, code in enumerate(codes):
            awaited = code.kernel.after - self.first
            if awaited > 0:
                other = self.timelines[1 - number].ends[awaited - 1]
                self.timelines[number].hold(other + self.core.semaphore_ps)
            times.append(code.time(point, self.timelines[number]))
        duration, moved = self._now() - before, sum(t.hbm_bytes for t in times)
        # Halves run the same code side by side: what computes is the busier one.
        compute = min(duration, max(t.compute_ps for t in times))
        together = KernelTime(times[0].name, duration, _busy_ps(times), compute, moved)
        if busiest := [code.busiest_ps(point) for code in codes if code.is_code]:
            together = _recovered(together, max(busiest), self.core.stall_recovery)
        lone = any(code.kernel.program.kind == "idle" for code in codes)
        self.times.append(replace(together, lone_ps=together.duration_ps) if lone else together)

    def taken(self, first: int) -> list[Segment]:
        """Everything so far, if anything; both cores are at the same point then. `first` is the
        next kernel.
        """
        times = self.times
        self._begin(first)
        if not times:
            return []
        whole = sum(t.duration_ps for t in times), sum(t.compute_ps for t in times)
        moved = sum(t.hbm_bytes for t in times)
        return [Segment("compute", *whole, _busy_ps(times), moved, kernels=tuple(times))]

    def _begin(self, first: int) -> None:
        self.first = first  # number of the first kernel of the stretch
        self.timelines = [CoreTimeline(self.core.semaphore_ps) for _ in range(self.cores)]
        self.times: list[KernelTime] = []

    def _now(self) -> int:
        return max(timeline.end_ps for timeline in self.timelines)


def _busy_ps(times: Sequence[KernelTime]) -> dict[str, int]:
    """Busy time per engine of all of them."""
    busy: dict[str, int] = {}
    for time in times:
        for engine, ps in time.busy_ps.items():
            busy[engine] = busy.get(engine, 0) + ps
    return busy
