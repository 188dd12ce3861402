"""Oracle of timed steps at the level of instructions: the cores of one HBM bank, with collectives.

Every instruction of every core is an item of work on its queue; loops are expanded, nothing is
folded, averaged or interpolated. Between events all that is in service progresses at the share of
DMA engines and HBM that holds just then, in exact fractions. A kernel ends when its instructions
have, and when the engines have moved all its loads and stores one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from shardwright.compiler.isa.costs import instr_interval_ps
from shardwright.compiler.isa.program import Engine, Function, Instr, Kernel, Loop, Space
from shardwright.compiler.machine.target import PS_PER_S, Target

DMA = (Engine.DMA_IN, Engine.DMA_OUT)


@dataclass(eq=False)
class Work:
    """An instruction in service, what it signals when it is done, or the wait for its latency."""

    engines_ps: Fraction  # with all DMA engines, or of any other engine
    hbm_ps: Fraction  # with an even part of HBM
    latency_ps: int
    signals: tuple[int, ...]
    shared: bool
    left: Fraction = Fraction(1)

    def duration(self, engines: Fraction, hbm: Fraction) -> Fraction:
        """At these shares."""
        if not self.shared:
            return self.engines_ps
        return max(self.engines_ps / engines, self.hbm_ps / hbm)


def expanded(body: Sequence[Instr | Loop]) -> Iterator[Instr]:
    """Instructions in program order, loops unrolled."""
    for item in body:
        if isinstance(item, Loop):
            for _ in range(item.trip):
                yield from expanded(item.body)
        else:
            yield item


def with_barriers(function: Function) -> Function:
    """`function` with a barrier in front of every kernel: what is compared here is how resources
    are shared; `event_heap.py` compares kernels without barriers.
    """

    def plain(body: Sequence[Instr | Loop]) -> list[Instr | Loop]:
        return [
            replace(i, body=plain(i.body)) if isinstance(i, Loop) else replace(i, borders=())
            for i in body
        ]

    kernels = [replace(k, body=plain(k.body), borders=None) for k in function.kernels]
    return replace(function, kernels=kernels)


@dataclass
class Collective:
    """One that takes a share of the engines of each core for a time, once all have come to it."""

    engines: Fraction
    duration_ps: int
    arrived: set[int] = field(default_factory=set)
    end_ps: Fraction | None = None


class Core:
    """A core on its way through a function."""

    def __init__(self, number: int, function: Function, target: Target, slow: int) -> None:
        self.number, self.function, self.target, self.slow = number, function, target, slow
        self.kernels = iter(function.kernels)
        self.kernel: Kernel | None = None
        self.queues: dict[Engine, list[Instr]] = {}
        self.serving: dict[Engine, Work] = {}
        self.settling: dict[Engine, list[Work]] = {engine: [] for engine in Engine}
        self.engine_work: list[Work] = []  # loads and stores, one after the other
        self.tokens: list[int] = []
        self.end_ps = self.code_end_ps = Fraction(0)

    def enter(self, kernel: Kernel) -> None:
        """Begin a kernel of code."""
        self.kernel, self.tokens = kernel, list(kernel.tokens)
        self.queues = {engine: [] for engine in Engine}
        for instr in expanded(kernel.body):
            self.queues[instr.engine].append(instr)
        moves = [i for engine in DMA for i in self.queues[engine]]
        self.engine_work = [self.work(instr) for instr in moves]

    def work(self, instr: Instr) -> Work:
        """What an instruction costs."""
        assert self.kernel is not None
        core = self.target.core
        if instr.opcode in ("wait", "signal"):
            return Work(Fraction(0), Fraction(0), 0, instr.signals, False)
        interval = instr_interval_ps(instr, self.kernel.tiles, self.function.tensors, core)
        if instr.engine in DMA:
            rate = self.target.hbm_bytes_per_s_per_core
            hbm_ps = round(self.hbm_bytes(instr) / rate * PS_PER_S)
            fixed = core.dma_fixed_ps
            return Work(Fraction(interval), Fraction(hbm_ps), fixed, instr.signals, True)
        latency = core.compute_latency_cycles * PS_PER_S // core.clock_hz[instr.engine.value]
        latency += core.semaphore_ps if instr.signals else 0
        return Work(Fraction(interval), Fraction(0), latency, instr.signals, False)

    def hbm_bytes(self, instr: Instr) -> int:
        """Bytes it reads from and writes to HBM."""
        assert instr.dst is not None
        elements = 1
        for size in instr.dst.shape:
            elements *= size
        patterns = [p for p in (instr.dst, *instr.srcs) if p and p.space is Space.HBM]
        return sum(elements * self.function.tensors[p.buffer].dtype.bytes for p in patterns)

    def issue(self) -> bool:
        """Put what can go into service; True when something moved."""
        moved = False
        for engine, waiting in self.queues.items():
            if waiting and engine not in self.serving and self._granted(waiting[0]):
                self.serving[engine] = self.work(waiting.pop(0))
                moved = True
        return moved

    def _granted(self, instr: Instr) -> bool:
        need = {s: instr.waits.count(s) for s in instr.waits}
        if any(self.tokens[s] < n for s, n in need.items()):
            return False
        for s, n in need.items():
            self.tokens[s] -= n
        return True

    def finish(self) -> bool:
        """Let go of what is done; True when something was."""
        done = [engine for engine, work in self.serving.items() if work.left == 0]
        for engine in done:
            work = self.serving.pop(engine)
            latency = Fraction(work.latency_ps)
            self.settling[engine].append(Work(latency, Fraction(0), 0, work.signals, False))
        settled = False
        for waiting in self.settling.values():  # a queue completes in order
            while waiting and (waiting[0].left == 0 or waiting[0].engines_ps == 0):
                settled = True
                for semaphore in waiting.pop(0).signals:
                    self.tokens[semaphore] += 1
        drained = bool(self.engine_work) and self.engine_work[0].left == 0
        if drained:
            self.engine_work.pop(0)
        return bool(done or settled or drained)

    @property
    def idle(self) -> bool:
        """Whether nothing of the kernel is left."""
        waiting = any(self.queues.values()) or any(self.settling.values())
        return not (waiting or self.serving or self.engine_work)

    @property
    def moving(self) -> list[Work]:
        """All that progresses."""
        settling = (work for waiting in self.settling.values() for work in waiting if work.left)
        return [*self.serving.values(), *settling, *self.engine_work[:1]]


class InstructionCluster:
    """Cores of one bank that run the same function; `slow` stretches all that a core does."""

    def __init__(
        self, function: Function, target: Target, collectives: Sequence[Collective], slow: list[int]
    ) -> None:
        self.cores = [Core(n, function, target, factor) for n, factor in enumerate(slow)]
        self.collectives, self.target = collectives, target
        self.waiting: dict[int, int] = {}
        self.now = Fraction(0)

    def run(self) -> list[Core]:
        """The cores, with the times at which they have finished, and finished their code."""
        running = set(self.cores)
        while running:
            while any([self._step(core, running) for core in self.cores if core in running]):
                pass
            speeds = [(w, self._duration(core, w)) for core in running for w in core.moving]
            waits = [w.left * duration for w, duration in speeds]
            ends = [c.end_ps for c in self.collectives if c.end_ps]
            later = [end - self.now for end in ends if end > self.now]
            if not running:
                break
            step = min([*waits, *later])
            self.now += step
            for work, duration in speeds:
                work.left = work.left - step / duration if duration else Fraction(0)
        return self.cores

    def _step(self, core: Core, running: set[Core]) -> bool:
        """Whatever takes no time; True when something moved."""
        if core.kernel is not None:
            if core.finish() or core.issue():
                return True
            if not core.idle:
                return False
            core.kernel, core.code_end_ps = None, self.now
            return True
        if core.number in self.waiting:
            end = self.collectives[self.waiting[core.number]].end_ps
            if end is None or end > self.now:
                return False
            del self.waiting[core.number]
        return self._next(core, running)

    def _next(self, core: Core, running: set[Core]) -> bool:
        """Go on to the next kernel."""
        kernel = next(core.kernels, None)
        if kernel is None:
            running.remove(core)
            core.end_ps = self.now
            return False
        kind, attrs = kernel.program.kind, kernel.program.attrs
        if kind == "collective_start":
            collective = self.collectives[attrs["collective"]]
            collective.arrived.add(core.number)
            if len(collective.arrived) == len(self.cores):
                collective.end_ps = self.now + collective.duration_ps
        elif kind == "collective_wait":
            self.waiting[core.number] = attrs["collective"]
        else:
            core.enter(kernel)
        return True

    def _duration(self, core: Core, work: Work) -> Fraction:
        """Of a piece of work at the present shares."""
        flying = [c for c in self.collectives if c.end_ps and c.end_ps > self.now]
        engines = 1 - sum((c.engines for c in flying), Fraction(0))
        beside = sum(c.kernel is not None for c in self.cores)
        hbm = Fraction(self.target.cores_per_bank, max(1, beside))
        return work.duration(engines, hbm) * core.slow
