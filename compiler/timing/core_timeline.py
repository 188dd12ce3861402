"""Kernels of one physical core, one after the other, on one timeline.

Between two kernels lies a barrier or nothing; then what a queue does of the second begins while
other queues are still at work on the first, and only instructions that name a border wait for it.
`evaluate.py` costs the code and adds up what it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.isa.program import Engine, Kernel
from shardwright.compiler.timing.max_plus import ENGINES, QUEUE, Timed, TimedLoop, Timeline

DMA = (Engine.DMA_IN, Engine.DMA_OUT)


class CoreTimeline:
    """The clocks of a physical core from kernel to kernel; `semaphore_ps` passes until another
    engine sees what a compute engine has done.

    Loads and stores are queues of their own that share the DMA engines: at the end of each kernel,
    all loads and stores up to there must have had their time since the first of them began. Where
    the queues say otherwise, everything so far takes that much longer.
    """

    def __init__(self, semaphore_ps: int) -> None:
        self._timeline = Timeline()
        self._seen_ps = [0 if engine in DMA else semaphore_ps for engine in ENGINES]
        self._finished: list[list[int]] = []  # per kernel, when others see each queue behind it
        self._moved_ps = 0  # when the DMA engines can have done everything so far
        self.end_ps = 0
        self.ends: list[int] = []  # `end_ps` behind each kernel

    def hold(self, until_ps: int) -> None:
        """The next kernel begins no earlier, on any queue."""
        self._timeline.hold(until_ps)

    def rest(self, duration_ps: int) -> None:
        """The next kernel does nothing for some time, behind a barrier."""
        self._timeline.hold(max(self.end_ps, *self._timeline.clock) + duration_ps)
        self.ended()

    def run(
        self, kernel: Kernel, body: Sequence[Timed | TimedLoop], dma_ps: int
    ) -> tuple[int, int]:
        """The next kernel: (how much later all has finished, time with any compute engine busy)."""
        timeline, before = self._timeline, self.end_ps
        if kernel.borders is None:
            timeline.hold(before)
        passed = [self._finished[-b.back][QUEUE[b.queue]] for b in kernel.borders or ()]
        timeline.enter(kernel.tokens, passed)
        timeline.run(body)
        if dma_ps:
            began = min(timeline.began[QUEUE[e]] for e in DMA if QUEUE[e] in timeline.began)
            self._moved_ps = max(self._moved_ps, began) + dma_ps
            timeline.delay(max(0, self._moved_ps - timeline.end_ps))
        self.ended()
        return self.end_ps - before, timeline.recorded_ps

    @property
    def spans(self) -> dict[Engine, tuple[int, int]]:
        """When each engine began its part of the last kernel with code, and had finished it."""
        began, done = self._timeline.began, self._timeline.done
        return {ENGINES[queue]: (start, done[queue]) for queue, start in began.items()}

    def ended(self) -> None:
        """The next kernel has ended, or is not there."""
        timeline = self._timeline
        self.end_ps = max(self.end_ps, timeline.end_ps)
        self.ends.append(self.end_ps)
        seen = zip(timeline.done, self._seen_ps, strict=True)
        self._finished.append([done + later for done, later in seen])
