"""Whether exp(a x + s c) stays within what it is in the end while c still moves.

c follows from an extreme over the segments so far. Beyond their extreme no x lies; so where c is
that extreme, or what clamps and choices make of it, a (x - c) is between 0 and its last value, on
either side, and what is added up early neither overflows nor vanishes. Of any other x nothing is
known: exp(x - c) may be an infinity that no later factor makes good. `online.py` asks.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from compiler.codegen.fusion import SCALED
from compiler.codegen.rows.spans import LOW_LIMIT
from compiler.codegen.space import Space
from compiler.dtypes import LARGEST, DType

# Products of the same scales in another order differ by their rounding.
_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Reference:
    """A column as sign * (what clamps and choices make of the running `extreme`): at any time at
    or beyond the extreme so far, or at its own last value.
    """

    extreme: int
    sign: float


def reference(space: Space, column: int, extremes: Collection[int]) -> Reference | None:
    """The reference a column is; None where nothing is known of it."""
    value = space.values[column]
    if column in extremes:
        return Reference(column, 1.0)
    if value.op in ("convert", "negate"):
        found = reference(space, value.inputs[0], extremes)
        turned = value.op == "negate"
        return Reference(found.extreme, -found.sign) if found and turned else found
    if value.op in ("maximum", "minimum"):
        neutral = -math.inf if value.op == "maximum" else math.inf
        rest = [i for i in value.inputs if _constant(space, i) != neutral]
        return _either(space, rest, extremes)
    return _chosen(space, value.inputs, extremes) if value.op == "select" else None


def _either(space: Space, inputs: Collection[int], extremes: Collection[int]) -> Reference | None:
    """Of references that agree, and of finite numbers."""
    found = {reference(space, i, extremes) for i in inputs if not _is_finite(space, i)}
    return found.pop() if len(found) == 1 else None


def _chosen(space: Space, inputs: tuple[int, ...], extremes: Collection[int]) -> Reference | None:
    """select(pred, a, b): a predicate that moves with the extreme could leave it behind, unless it
    only asks whether that is a number: a running extreme begins with one.
    """
    pred, a, b = inputs
    asked = space.values[pred]
    if asked.op == "not":
        asked, a, b = space.values[asked.inputs[0]], b, a
    both = _either(space, (a, b), extremes)
    if asked.op == "is_finite" and reference(space, asked.inputs[0], extremes):
        return both if reference(space, a, extremes) else None
    return both if not set(space.slice([pred])) & set(extremes) else None


def _constant(space: Space, number: int) -> float | None:
    value = space.values[number]
    return float(value.attrs["value"]) if value.op == "constant" else None


def _is_finite(space: Space, number: int) -> bool:
    constant = _constant(space, number)
    return constant is not None and math.isfinite(constant)


def is_bounded(space: Space, term: tuple[int, float], to: Reference, sign: float) -> bool:
    """Whether exp(scale * x + sign * column), `term` being (x, scale) and the column `to`, is
    bounded: x is what the extreme is of, or that with more elements made as low as any.
    """
    of = space.values[to.extreme]
    root, by = _unscaled(space, of.inputs[0])
    x, scale = term
    while True:
        found, times = _unscaled(space, x)
        if found == root:
            return math.isclose(scale * times, -sign * to.sign * by, rel_tol=_CLOSE)
        value = space.values[found]
        lowers = value.op == "select" and of.attrs["kind"] == "max" and scale * times > 0
        if not lowers or not _is_lowest(space, value.inputs[2], of.inputs[0]):
            return False
        x, scale = value.inputs[1], scale * times


def _unscaled(space: Space, number: int) -> tuple[int, float]:
    """(value, number) whose product a value is, exactly but for the rounding of a product."""
    scale = 1.0
    while True:
        value = space.values[number]
        product = value.op == SCALED and value.attrs["func"] == "identity"
        by = value.attrs["scale"] if product and value.attrs["bias"] == 0.0 else None
        if value.dtype is not DType.F32 or (value.op != "convert" and by is None):
            return number, scale
        if not space.values[value.inputs[0]].dtype.is_float:
            return number, scale
        number, scale = value.inputs[0], scale * (1.0 if by is None else float(by))


def _is_lowest(space: Space, number: int, others: int) -> bool:
    """Whether a constant is at most as high as anything in `others`."""
    value = space.values[number]
    if value.op != "constant" or float(value.attrs["value"]) > LOW_LIMIT:
        return False
    low = float(value.attrs["value"])
    return low <= -LARGEST[DType.F32] or low <= _least(space, others)


def _least(space: Space, number: int) -> float:
    """As low as a value may be, where sums of products are taken to be above LOW_LIMIT."""
    value = space.values[number]
    if value.op == "constant":
        return min(0.0, float(value.attrs["value"]))
    if value.op == "contract" or not value.dtype.is_float:
        return LOW_LIMIT
    return min((_least(space, i) for i in value.inputs), default=-math.inf)
