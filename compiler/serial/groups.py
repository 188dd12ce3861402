"""Operators shared out to cores: as many groups of neighbours as there are cores.

The slowest group is as fast as it can be, within `SLACK`; where that leaves a choice, the cut is
where the fewest bytes are handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

SLACK = 0.1
"""How much slower than the best the slowest group may be, for a cheaper place to cut (our
choice)."""
_HALVINGS = 50


def group_ends(costs: Sequence[float], crossing: Sequence[float], groups: int) -> list[int]:
    """Position behind the last operator of each group, ascending, the last one `len(costs)`.

    `costs` are of the operators in order; `crossing[k]` is what is handed over where the first `k`
    operators are cut off. Every group has an operator: `groups` is at most `len(costs)`.
    """
    count = len(costs)
    assert 0 < groups <= count
    sums = [0.0, *accumulate(costs)]
    bound = (1 + SLACK) * _least_bound(sums, groups)
    latest_start = _latest_starts(sums, bound, groups)
    ends, start = list[int](), 0
    for group in range(1, groups):
        left = groups - group
        last = min(count - left, max(start + 1, _reach(sums, start, bound)))
        first = min(last, max(start + 1, latest_start[left]))
        ideal = sums[start] + (sums[count] - sums[start]) / (left + 1)
        start = min(
            range(first, last + 1), key=lambda at: (crossing[at], abs(sums[at] - ideal), at)
        )
        ends.append(start)
    return [*ends, count]


def _least_bound(sums: Sequence[float], groups: int) -> float:
    """What the slowest group takes at least, by halving: a bound fits when groups that go as far
    as it allows reach the end."""
    low, high = 0.0, sums[-1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        at = 0
        for _ in range(groups):
            at = max(at, _reach(sums, at, middle))
        low, high = (low, middle) if at == len(sums) - 1 else (middle, high)
    return high


def _reach(sums: Sequence[float], start: int, bound: float) -> int:
    """The furthest position to which operators from `start` on stay within `bound`."""
    at = start
    while at + 1 < len(sums) and sums[at + 1] - sums[start] <= bound:
        at += 1
    return at


def _latest_starts(sums: Sequence[float], bound: float, groups: int) -> list[int]:
    """By how many groups are left, the earliest position from which they reach the end."""
    starts = [len(sums) - 1]
    for _ in range(groups):
        at = starts[-1]
        while at > 0 and sums[starts[-1]] - sums[at - 1] <= bound:
            at -= 1
        starts.append(at)
    return starts
