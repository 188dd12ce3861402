"""Happens-before: vector clocks of the engine queues, and who touched a piece of memory when.

Every queue counts its instructions; a token carries the clock of the instruction that signalled it
and a wait joins it. An access is a race when an earlier conflicting one of another queue is not in
its past. A `History` keeps the newest access per queue and box, so that the usual check is two
comparisons of short lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import gt

from shardwright.compiler.isa.program import Engine

ENGINES = tuple(Engine)
NUMBER = {engine: i for i, engine in enumerate(ENGINES)}
Clock = list[int]  # instructions of each queue known to have finished
Key = tuple[int, ...]  # what was touched, in the terms of the `overlap` function of the history
Overlap = Callable[[Key, Key], bool]


def boxes_overlap(a: Key, b: Key) -> bool:
    """Boxes (first partition, end partition, first byte, end byte)."""
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


class History:
    """Accesses to one tile slot or one group of overlapping HBM tensors since the last barrier."""

    def __init__(self, overlap: Overlap = boxes_overlap) -> None:
        self._overlap = overlap
        self.clear()

    def clear(self) -> None:
        """Forget everything (a barrier)."""
        self.last_read, self.last_write = [0] * len(ENGINES), [0] * len(ENGINES)
        self.reads: dict[tuple[int, Key], int] = {}
        self.writes: dict[tuple[int, Key], int] = {}

    def conflict(self, key: Key, clock: Clock, writes: bool) -> str:
        """What a read or write of `key` with `clock` races with; empty when nothing."""
        if any(map(gt, self.last_write, clock)) and (
            found := self._find(self.writes, key, clock, "written")
        ):
            return found
        if writes and any(map(gt, self.last_read, clock)):
            return self._find(self.reads, key, clock, "read")
        return ""

    def add(self, key: Key, engine: int, time: int, writes: bool) -> None:
        """Record an access by instruction `time` of queue `engine`."""
        (self.last_write if writes else self.last_read)[engine] = time
        (self.writes if writes else self.reads)[engine, key] = time

    def forget_before(self, clocks: Sequence[Clock], engines: Sequence[int]) -> None:
        """Drop what is in the past of all `engines`: nothing can race with it any more."""
        for records in (self.reads, self.writes):
            done = [
                k for k, time in records.items() if all(clocks[e][k[0]] >= time for e in engines)
            ]
            for k in done:
                del records[k]

    def _find(self, records: dict[tuple[int, Key], int], key: Key, clock: Clock, verb: str) -> str:
        for (engine, other), time in records.items():
            if time > clock[engine] and self._overlap(key, other):
                return f"{verb} by instruction {time} of the {ENGINES[engine].value} queue"
        return ""


# A strided pattern as a flat key: (byte address, stride, size, stride, size, ...), in bytes,
# strides positive.


def strided_key(address: int, dims: Sequence[tuple[int, int]], item: int) -> Key:
    """Key of the bytes that element dims (byte stride, size) touch from `address`."""
    flat = []
    for stride, size in (*dims, (1, item)):
        if stride < 0:
            address, stride = address + stride * (size - 1), -stride
        if stride and size > 1:
            flat += [stride, size]
    return (address, *flat)


def strides_overlap(a: Key, b: Key) -> bool:
    """Whether two strided patterns share a byte. Exact up to a search budget, then pessimistic."""
    bounds: dict[int, list[int]] = {}
    for key, sign in ((a, 1), (b, -1)):
        for stride, size in zip(key[1::2], key[2::2], strict=True):
            low_high = bounds.setdefault(stride, [0, 0])
            low_high[sign > 0] += sign * (size - 1)
    levels = sorted(((s, low, high) for s, (low, high) in bounds.items()), reverse=True)
    return _reachable(levels, 0, b[0] - a[0], [_BUDGET])


_BUDGET = 20000


def _reachable(
    levels: list[tuple[int, int, int]], at: int, distance: int, budget: list[int]
) -> bool:
    """Whether sum(stride * x) == distance has a solution with every x inside its bounds."""
    if at == len(levels):
        return distance == 0
    budget[0] -= 1
    if budget[0] < 0:
        return True
    stride, low, high = levels[at]
    rest_low = sum(s * lo for s, lo, _ in levels[at + 1 :])
    rest_high = sum(s * hi for s, _, hi in levels[at + 1 :])
    first = max(low, -((rest_high - distance) // stride))
    last = min(high, (distance - rest_low) // stride)
    return any(
        _reachable(levels, at + 1, distance - stride * x, budget) for x in range(first, last + 1)
    )
