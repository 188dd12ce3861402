"""The graph of kernels while they grow: who must run before whom, and what each can reach.

A kernel is named by one of its tasks. Reachability is a bit set per kernel, kept up to date by
`join`, so that the question whether a merge would close a cycle costs a few integer operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwright.compiler.ir.topological import topological
from shardwright.compiler.lower.order import Order


class KernelGraph:
    """Dependencies between kernels. `members` maps kernel -> task numbers."""

    def __init__(self, order: Order, members: Mapping[int, Collection[int]]) -> None:
        self._members = {k: list(numbers) for k, numbers in members.items()}
        self.kernel = {n: k for k, numbers in members.items() for n in numbers}
        self._before: dict[int, set[int]] = {k: set() for k in members}
        self._after: dict[int, set[int]] = {k: set() for k in members}
        for task in order.body.tasks:
            mine = self.kernel[task.number]
            for number in order.before(task):
                other = self.kernel[number]
                if other != mine:
                    self._before[mine].add(other)
                    self._after[other].add(mine)
        self._reach = self._reachable()

    def _reachable(self) -> dict[int, int]:
        """Bit set of the kernels reachable from each kernel."""
        reach: dict[int, int] = {}
        for kernel in topological(self._after, lambda k: k):
            reach[kernel] = 0
            for later in self._after[kernel]:
                reach[kernel] |= reach[later] | 1 << later
        assert len(reach) == len(self._after), "kernels wait for each other"
        return reach

    def acyclic(self, a: int, b: int) -> bool:
        """True when no path leaves `a`, passes another kernel and enters `b`."""
        bit = 1 << b
        return not any(self._reach[later] & bit for later in self._after[a] if later != b)

    def join(self, a: int, b: int) -> None:
        """Make kernel `b` a part of kernel `a`, which comes before it."""
        moved = self._members.pop(b)
        self._members[a] += moved
        self.kernel.update(dict.fromkeys(moved, a))
        for side in (self._before, self._after):
            opposite = self._after if side is self._before else self._before
            for other in side.pop(b):
                opposite[other].discard(b)
                if other != a:
                    side[a].add(other)
                    opposite[other].add(a)
            side[a].discard(b)
        both, gone = 1 << a | 1 << b, ~(1 << b)
        reach = (self._reach[a] | self._reach.pop(b)) & ~both
        self._reach[a] = reach
        joined = reach | 1 << a
        for other, mask in self._reach.items():
            if mask & both:  # never `a` itself
                self._reach[other] = (mask | joined) & gone
