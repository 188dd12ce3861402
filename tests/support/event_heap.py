"""Oracle of the evaluator: engines as processes on an event heap, every loop expanded, nothing
folded, from kernel to kernel."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from shardwright.compiler.timing.max_plus import ENGINES, Body, Timed, TimedLoop


def expand(body: Body, queue: int) -> Iterator[Timed]:
    """The instruction stream of one queue."""
    for item in body:
        if isinstance(item, TimedLoop):
            for _ in range(item.trip):
                yield from expand(item.body, queue)
        elif item.queue == queue:
            yield item


Chained = tuple[Body, Sequence[int], Sequence[tuple[int, int]]]
"""A kernel: code, tokens, and borders as (queue, kernels back)."""


class Heap:
    """Queues that go through kernels without a barrier, each on its own; `seen_ps` is how much
    later than its last instruction others see a queue behind a kernel.
    """

    def __init__(self, kernels: Sequence[Chained], seen_ps: Sequence[int]) -> None:
        self.kernels, self.seen_ps = kernels, seen_ps
        count = range(len(ENGINES))
        self.streams = {q: self.stream(q) for q in count}
        self.at = dict.fromkeys(count, 0)  # the kernel a queue has come to
        self.free = dict.fromkeys(count, 0)
        self.done = dict.fromkeys(count, 0)
        self.tokens = [list(tokens) for _, tokens, _ in kernels]
        self.passed: dict[tuple[int, int], int] = {}  # when a queue is behind a kernel
        self.events: list[tuple[int, int, int, tuple[int, ...]]] = [(0, 0, 0, ())]
        self.sequence = 0
        self.head = {q: self.next(q) for q in count}

    def stream(self, queue: int) -> Iterator[tuple[int, Timed]]:
        """The instructions of a queue with their kernels."""
        for number, (body, _, _) in enumerate(self.kernels):
            for item in expand(body, queue):
                yield number, item

    def push(self, when: int, kernel: int = 0, signals: tuple[int, ...] = ()) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (when, self.sequence, kernel, signals))

    def next(self, queue: int) -> Timed | None:
        """The next instruction of a queue; kernels it leaves behind are noted."""
        kernel, instr = next(self.streams[queue], (len(self.kernels), None))
        for number in range(self.at[queue], kernel):
            self.passed[queue, number] = when = self.done[queue] + self.seen_ps[queue]
            self.push(when)
        self.at[queue] = kernel
        return instr

    def issue(self, queue: int, instr: Timed, now: int) -> bool:
        """Begin an instruction if nothing holds it up."""
        kernel = self.at[queue]
        count, borders = self.tokens[kernel], self.kernels[kernel][2]
        need = {s: instr.waits.count(s) for s in instr.waits}
        if self.free[queue] > now or any(count[s] < n for s, n in need.items()):
            return False
        for awaited, back in (borders[b] for b in instr.borders):
            if self.passed.get((awaited, kernel - back), now + 1) > now:
                return False
        for s, n in need.items():
            count[s] -= n
        self.free[queue] = now + instr.interval_ps
        self.done[queue] = max(self.done[queue], self.free[queue] + instr.latency_ps)
        self.push(self.free[queue])
        self.push(self.done[queue], kernel, instr.signals)
        self.head[queue] = self.next(queue)
        return True

    def run(self) -> int:
        """When the last instruction has finished."""
        while self.events:
            now, _, kernel, signals = heapq.heappop(self.events)
            for semaphore in signals:
                self.tokens[kernel][semaphore] += 1
            waiting = True
            while waiting:
                ready = [(q, i) for q, i in self.head.items() if i is not None]
                waiting = any([self.issue(q, i, now) for q, i in ready])
        stuck = [ENGINES[q] for q, instr in self.head.items() if instr is not None]
        assert not stuck, f"deadlock on {stuck}"
        return max(self.done.values())


def end_time(body: Body, tokens: Sequence[int]) -> int:
    """When the last instruction of one kernel has finished, by discrete events."""
    return Heap([(body, tokens, ())], [0] * len(ENGINES)).run()
