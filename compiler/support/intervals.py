"""Intervals of integers: (least, largest) of what a value may be, as long as it stays in its type.

What leaves its type wraps around, and an interval says nothing of it any more. Whoever follows
integers through arithmetic asks `within` after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np

from shardwright.compiler.dtypes import DType

Interval = tuple[int, int]


def limits(dtype: DType) -> Interval:
    """Least and largest value of an integer type or of i1."""
    if dtype is DType.PRED:
        return 0, 1
    info = np.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


def within(found: Interval | None, dtype: DType) -> Interval | None:
    """`found`, or None where it leaves the type."""
    if found is None:
        return None
    low, high = limits(dtype)
    return found if low <= found[0] <= found[1] <= high else None


def corners(function: Callable[[int, int], int], a: Interval, b: Interval) -> Interval:
    """What a function of two numbers that is monotone in each makes of two intervals."""
    ends = [int(function(x, y)) for x, y in product(a, b)]
    return min(ends), max(ends)
