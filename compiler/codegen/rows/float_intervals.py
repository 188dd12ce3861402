"""How large a float may be that is made of constants and data: the reasoning behind LOW.

Data counts as 0: the assumption of `docs/numerics.md` is that it is small beside a constant that
stands for "never". An interval holds 0 unless it is LOW, so only what was LOW before can be LOW,
and the selects that made it so are those whose rows are looked at (`columns.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Below this a constant stands for "never": scores within 104 of it would have to be as low (our
# choice; exp(-104) is the first fp32 zero).
LOW_LIMIT = -1e6


@dataclass(frozen=True, slots=True)
class FloatInterval:
    """`low` to `high` plus what data adds; everywhere in a box."""

    low: float
    high: float

    @property
    def is_low(self) -> bool:
        """Whether the exponential is zero, whatever the data adds."""
        return self.high <= LOW_LIMIT

    @property
    def is_data(self) -> bool:
        """Whether no constant that stands for "never" is left in it, of either sign."""
        return self.low > LOW_LIMIT and self.high < -LOW_LIMIT

    @property
    def is_finite(self) -> bool:
        """Whether zero times it is zero."""
        return math.isfinite(self.low) and math.isfinite(self.high)


DATA = FloatInterval(0.0, 0.0)
WILD = FloatInterval(-math.inf, math.inf)  # may be as far from data as a constant is


def interval(low: float, high: float) -> FloatInterval:
    """From `low` to `high`, widened to 0 unless it is LOW."""
    if math.isnan(low) or math.isnan(high):
        return WILD
    return FloatInterval(min(low, 0.0), high if high <= LOW_LIMIT else max(high, 0.0))


def either(a: FloatInterval, b: FloatInterval) -> FloatInterval:
    """One of both: LOW only if both are."""
    return interval(min(a.low, b.low), max(a.high, b.high))


def added(a: FloatInterval, b: FloatInterval) -> FloatInterval:
    """LOW if one is, and the other cannot lift it above the limit."""
    return interval(a.low + b.low, a.high + b.high)


def times(a: FloatInterval, number: float) -> FloatInterval:
    """A product with a constant; a negative one maps `low`, never positive, to the new `high`."""
    ends = a.low * number, a.high * number
    return interval(min(ends), max(ends))


def greater(a: FloatInterval, b: FloatInterval) -> FloatInterval:
    """The greater of two: at least as high as either, so LOW only if both are."""
    return interval(max(a.low, b.low), max(a.high, b.high))


def lesser(a: FloatInterval, b: FloatInterval) -> FloatInterval:
    """LOW only if both are: else a row may have no column where neither is."""
    return either(a, b)


def other(*given: FloatInterval) -> FloatInterval:
    """Any further function: of data it is data, of more nothing is known."""
    return DATA if all(g.is_data for g in given) else WILD


def exponential(a: FloatInterval) -> FloatInterval:
    """Of what is not LOW; between 0 and the exponential of data however low it reaches."""
    return DATA if a.high < -LOW_LIMIT else WILD
