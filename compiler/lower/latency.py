"""Latency hiding: orders of kernels in which code runs while collectives are in flight.

A core runs kernels one by one. Beside it a stream serves collectives in the order in which they
start, and each direction of the host's link its transfers. What they are expected to take is the
cost oracle's to say (`cost_oracle.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from shardwright.compiler.ir.types import Op
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.program import TRANSFERS
from shardwright.compiler.lower.cost_oracle import CostOracle
from shardwright.compiler.lower.order import Order
from shardwright.compiler.lower.task import COLLECTIVE


@dataclass(slots=True)
class Progress:
    """How far a core and what serves its collectives have come, in picoseconds."""

    now: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)
    _served: defaultdict[Hashable, float] = field(default_factory=lambda: defaultdict(float))

    def compute(self, duration_ps: float) -> None:
        """Run code."""
        self.now += duration_ps

    def start(self, collective: int, duration_ps: float, queue: Hashable = 0) -> None:
        """Queue a collective."""
        self._served[queue] = max(self.now, self._served[queue]) + duration_ps
        self.ends[collective] = self._served[queue]

    def wait(self, collectives: Collection[int]) -> None:
        """Wait for collectives that have started."""
        self.now += self.stall(collectives)

    def stall(self, collectives: Collection[int]) -> float:
        """How long code would wait for collectives that have started."""
        ends = (self.ends.get(collective, 0.0) for collective in collectives)
        return max(0.0, max(ends, default=0.0) - self.now)

    @property
    def end(self) -> float:
        """When everything is done."""
        return max(self.now, max(self.ends.values(), default=0.0))


def queue_of(op: Op) -> Hashable:
    """What serves a collective in order (`CollectiveCall.queue`)."""
    return op.name if op.name in TRANSFERS else 0


def makespan_ps(
    kernels: Sequence[KernelProgram],
    times: Sequence[float],
    flights: Sequence[float],
    queues: Sequence[Hashable],
) -> float:
    """Picoseconds from the first of `kernels` to the last, which take `times` on the core, and of
    whose collectives each is in flight for as long as `flights` say, behind others in its queue.
    """
    progress = Progress()
    for kernel, time in zip(kernels, times, strict=True):
        number = kernel.attrs.get("collective", -1)
        if kernel.kind == "collective_wait":
            progress.wait((number,))
        progress.compute(time)
        if kernel.kind == "collective_start":
            progress.start(number, flights[number], queues[number])
    return progress.end


def arrivals_ps(order: Order, oracle: CostOracle) -> dict[int, float]:
    """When the last collective is over that each task waits for, if code took no time."""
    progress, found = Progress(), dict[int, float]()
    for number in order.sorted():
        task = order.body.tasks[number]
        progress.now = max((found[earlier] for earlier in order.before(task)), default=0.0)
        found[number] = progress.now
        if task.kind == COLLECTIVE:
            progress.start(number, oracle.collective_ps(task.op), queue_of(task.op))
            found[number] = progress.ends[number]
    return found


@dataclass(frozen=True, slots=True)
class Hiding:
    """Kernels to be put in order: which others each has to run after (`before`), which collectives
    have to be over (`finished`), what each takes, and which are collectives, with what serves them
    (`queues`).
    """

    before: Mapping[int, Collection[int]]
    finished: Mapping[int, Collection[int]]
    times: Mapping[int, float]
    queues: Mapping[int, Hashable]

    def tails(self, order: Sequence[int]) -> dict[int, float]:
        """Picoseconds from the start of each kernel to the end of all that waits for it: the
        critical path behind it."""
        behind: defaultdict[int, float] = defaultdict(float)
        for kernel in reversed(order):
            behind[kernel] += self.times[kernel]
            for earlier in self.before[kernel]:
                behind[earlier] = max(behind[earlier], behind[kernel])
        return behind

    def order(self, rank: Mapping[int, tuple[bool, bool, float]]) -> list[int]:
        """Kernels in dependency order: of those that are ready the one that waits for collectives
        the least, of these the one of the lowest rank.
        """
        waiting, ready = TopologicalSorter(self.before), list[int]()
        progress, found = Progress(), list[int]()
        waiting.prepare()
        while waiting.is_active():
            ready += waiting.get_ready()
            kernel = min(ready, key=lambda k: (progress.stall(self.finished[k]), rank[k], k))
            ready.remove(kernel)
            self._run(kernel, progress)
            found.append(kernel)
            waiting.done(kernel)
        return found

    def _run(self, kernel: int, progress: Progress) -> None:
        progress.wait(self.finished[kernel])
        if kernel in self.queues:
            progress.start(kernel, self.times[kernel], self.queues[kernel])
        else:
            progress.compute(self.times[kernel])
