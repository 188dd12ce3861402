"""Dependency tokens: collectives of low priority start behind those a layer waits for itself.

A stream serves its collectives in the order in which they start. What partitioning gives low
priority (gathers of weights, reductions of gradients) is often ready early and would stand in front
of the layer's own collectives. Here each gets a token from one of those, an edge of the order of
regions: it starts right behind it, and runs beside the code up to the next one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from shardwright.compiler.ir.facts import sent_bytes
from shardwright.compiler.ir.types import Op
from shardwright.compiler.lower.task import COLLECTIVE, CONTRACT, Task


class DependencyTokens:
    """Which collectives wait for which. The order of kernels without tokens is cut by the layer's
    own collectives in it: window `w` is the code behind `w` of them.

    `tasks` are those of every kernel, `before` the kernels it waits for, `idle` the kernels no
    contraction waits for.
    """

    def __init__(
        self,
        tasks: Mapping[int, Sequence[Task]],
        order: Sequence[int],
        before: Mapping[int, Collection[int]],
        idle: Collection[int],
    ) -> None:
        self.tasks, self.order, self.before, self.idle = tasks, order, before, idle
        self.place = {kernel: at for at, kernel in enumerate(order)}
        flying = [k for k in order if self.tasks[k][0].kind == COLLECTIVE]
        self.low_priority = [k for k in flying if getattr(self._op(k).attrs, "low_priority", False)]
        behind = self._following([k for k in self.low_priority if k in self.idle])
        self.own = [k for k in flying if k not in self.low_priority and k not in behind]
        self.starts = [self.place[k] for k in self.own]

    def tokens(self) -> dict[int, int]:
        """Kernel of a collective of low priority -> kernel it starts behind.

        Those that need nothing of this function are shared out over the windows by the work there:
        first what is needed here, which waits for the first of the layer's collectives at most, so
        that the stream is not idle; then the idle ones. Idle ones that are made here (gradients)
        start in the next window. No idle one leads to a collective of the layer, so that nothing
        waits for itself.
        """
        if not self.own:
            return {}
        computed = self._following([k for k in self.order if self._computes(k)])
        early = [k for k in self.low_priority if k not in computed]
        early.sort(key=lambda k: k in self.idle)
        window = dict(zip(early, self._shared(early), strict=True))
        for kernel in self.low_priority:
            if kernel in self.idle and kernel in computed:
                made = max(self.place[k] for k in self.before[kernel])
                window[kernel] = bisect_right(self.starts, made) + 1
            elif kernel in window and kernel not in self.idle:
                window[kernel] = min(window[kernel], self._needed(kernel) - 1, 1)
        last = len(self.own)
        return {k: self.own[min(w, last) - 1] for k, w in window.items() if w > 0}

    def _needed(self, kernel: int) -> int:
        """The window in which a result is read first."""
        readers = (self.place[k] for k, earlier in self.before.items() if kernel in earlier)
        return bisect_right(self.starts, min(readers))

    def _shared(self, early: Sequence[int]) -> list[int]:
        """Windows for collectives that could start at once: bytes follow work."""
        work = [0] * (len(self.own) + 1)
        for at, kernel in enumerate(self.order):
            work[bisect_right(self.starts, at)] += self._flops(kernel)
        reached = list(accumulate(work if any(work) else [1] * len(work)))
        sizes = [sent_bytes(self._op(k)) for k in early]
        ends = accumulate(sizes)
        middles = [(end - size / 2) / sum(sizes) for end, size in zip(ends, sizes, strict=True)]
        return [bisect_left(reached, middle * reached[-1]) for middle in middles]

    def _op(self, kernel: int) -> Op:
        """The collective of a kernel."""
        return self.tasks[kernel][0].op

    def _computes(self, kernel: int) -> bool:
        """True for what is named by a contraction, and the layer's own collectives."""
        named = next(task for task in self.tasks[kernel] if task.number == kernel)
        return named.kind == CONTRACT or kernel in self.own

    def _flops(self, kernel: int) -> int:
        return sum(task.flops for task in self.tasks[kernel])

    def _following(self, kernels: Collection[int]) -> set[int]:
        """`kernels` and all that must run after one of them."""
        found = set(kernels)
        for kernel in self.order:
            if not found.isdisjoint(self.before[kernel]):
                found.add(kernel)
        return found
