"""Whether exp(a x + s c) stays within what it is in the end while c still moves.

c follows from an extreme over the column tiles so far. Beyond their extreme no x lies; so where c
is that extreme, or what clamps and choices make of it, a (x - c) is between 0 and its last value,
on either side, and what is added up early neither overflows nor vanishes. Of any other x nothing is
known: exp(x - c) may be an infinity that no later factor makes good. `online.py` asks.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from shardwright.compiler.codegen.domain import Domain, Numbers, Value
from shardwright.compiler.codegen.fusion import is_product
from shardwright.compiler.codegen.rows.float_intervals import LOW_LIMIT
from shardwright.compiler.dtypes import LARGEST, DType
from shardwright.compiler.support.walks import answered

# Products of the same scales in another order differ by their rounding.
_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Reference:
    """A column: sign * the running `extreme`, clamped or chosen: always beyond that so far."""

    extreme: int
    sign: float


References = dict[int, Reference | None]


def reference(domain: Domain, column: int, extremes: Collection[int]) -> Reference | None:
    """The reference a column is; None where nothing is known of it."""
    known: References = {}

    def needs(n: int) -> list[int]:
        return [] if n in extremes else _read(domain, n)

    def find(n: int) -> Reference | None:
        return Reference(n, 1.0) if n in extremes else _followed(domain, n, extremes, known)

    return answered(column, known, needs, find)


def _read(domain: Domain, number: int) -> list[int]:
    """What a column may be the reference of."""
    value = domain[number]
    if value.op == "select":
        asked = _asked(domain, value.inputs)[0]
        return [*value.inputs[1:], *(asked.inputs if asked.op == "is_finite" else ())]
    keeps = value.op in ("convert", "negate", "maximum", "minimum")
    return list(value.inputs) if keeps else []


def _followed(
    domain: Domain, number: int, extremes: Collection[int], known: References
) -> Reference | None:
    """What a column is, where that is `known` of what it reads."""
    value = domain[number]
    if value.op in ("convert", "negate"):
        found = known[value.inputs[0]]
        turned = value.op == "negate"
        return Reference(found.extreme, -found.sign) if found and turned else found
    if value.op in ("maximum", "minimum"):
        neutral = -math.inf if value.op == "maximum" else math.inf
        rest = [i for i in value.inputs if _constant(domain, i) != neutral]
        return _either(domain, rest, known)
    return _chosen(domain, value.inputs, extremes, known) if value.op == "select" else None


def _either(domain: Domain, inputs: Collection[int], known: References) -> Reference | None:
    """Of references that agree, and of finite numbers."""
    found = {known[i] for i in inputs if not _is_finite(domain, i)}
    return found.pop() if len(found) == 1 else None


def _chosen(
    domain: Domain, inputs: Numbers, extremes: Collection[int], known: References
) -> Reference | None:
    """select(pred, a, b): a predicate that moves with the extreme could leave it behind, unless it
    only asks whether that is a number: a running extreme begins with one.
    """
    asked, a, b = _asked(domain, inputs)
    both = _either(domain, (a, b), known)
    if asked.op == "is_finite" and known[asked.inputs[0]]:
        return both if known[a] else None
    return both if not set(domain.slice([inputs[0]])) & set(extremes) else None


def _asked(domain: Domain, inputs: Numbers) -> tuple[Value, int, int]:
    """The predicate of a select without a `not`, what is chosen where it holds, and where not."""
    pred, a, b = inputs
    asked = domain[pred]
    return (domain[asked.inputs[0]], b, a) if asked.op == "not" else (asked, a, b)


def _constant(domain: Domain, number: int) -> float | None:
    value = domain[number]
    return float(value.attrs["value"]) if value.op == "constant" else None


def _is_finite(domain: Domain, number: int) -> bool:
    constant = _constant(domain, number)
    return constant is not None and math.isfinite(constant)


def is_bounded(domain: Domain, term: tuple[int, float], to: Reference, sign: float) -> bool:
    """Whether exp(scale * x + sign * column), `term` being (x, scale) and the column `to`, is
    bounded: x is what the extreme is of, or that with more elements made as low as any.
    """
    of = domain[to.extreme]
    root, by = _unscaled(domain, of.inputs[0])
    x, scale = term
    while True:
        found, times = _unscaled(domain, x)
        if found == root:
            return math.isclose(scale * times, -sign * to.sign * by, rel_tol=_CLOSE)
        value = domain[found]
        lowers = value.op == "select" and of.attrs["kind"] == "max" and scale * times > 0
        if not lowers or not _is_lowest(domain, value.inputs[2], of.inputs[0]):
            return False
        x, scale = value.inputs[1], scale * times


def _unscaled(domain: Domain, number: int) -> tuple[int, float]:
    """(value, number) whose product a value is, exactly but for the rounding of a product."""
    scale = 1.0
    while True:
        value = domain[number]
        by = value.attrs["scale"] if is_product(value) else None
        if value.dtype is not DType.F32 or (value.op != "convert" and by is None):
            return number, scale
        if not domain[value.inputs[0]].dtype.is_float:
            return number, scale
        number, scale = value.inputs[0], scale * (1.0 if by is None else float(by))


def _is_lowest(domain: Domain, number: int, others: int) -> bool:
    """Whether a constant is at most as high as anything in `others`."""
    value = domain[number]
    if value.op != "constant" or float(value.attrs["value"]) > LOW_LIMIT:
        return False
    low = float(value.attrs["value"])
    return low <= -LARGEST[DType.F32] or low <= _least(domain, others)


def _least(domain: Domain, number: int) -> float:
    """As low as a value may be, where sums of products are taken to be above LOW_LIMIT."""
    known: dict[int, float] = {}

    def read(n: int) -> Numbers:
        value = domain[n]
        return () if value.op == "contract" or not value.dtype.is_float else value.inputs

    def least(n: int) -> float:
        value = domain[n]
        if value.op == "constant":
            return min(0.0, float(value.attrs["value"]))
        if value.op == "contract" or not value.dtype.is_float:
            return LOW_LIMIT
        return min((known[i] for i in value.inputs), default=-math.inf)

    return answered(number, known, read, least)
