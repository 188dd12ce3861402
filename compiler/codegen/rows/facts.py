"""What is known of a region's values on a box of points, before anything runs.

Predicates over iotas are decided by intervals; a select with a decided predicate is one of its
branches. A constant so low that its exponential is zero is LOW, and what is exactly zero is ZERO.
`docs/numerics.md` states the assumption behind LOW. Next: `columns.py` leaves out what is decided.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from compiler.codegen.fusion import SCALED
from compiler.codegen.space import Space, Value

# Below this a constant stands for "never": scores within 104 of it would have to be as low (our
# choice; exp(-104) is the first fp32 zero).
LOW_LIMIT = -1e6


class Fact(enum.Enum):
    """A value that is the same kind of thing everywhere in a box."""

    TRUE = "true"
    FALSE = "false"
    LOW = "low"
    ZERO = "zero"


Interval = tuple[int, int]
Known = Fact | Interval
Ranges = Mapping[int, tuple[int, int]]  # atom -> first point, end
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_LOGIC: dict[str, Callable[[Any, Any], Any]] = {"and": np.logical_and, "or": np.logical_or}


def facts(space: Space, numbers: Iterable[int], ranges: Ranges) -> dict[int, Known]:
    """What is known of the values `numbers` (in order) where each atom stays in its range."""
    known: dict[int, Known] = {}
    for n in numbers:
        found = _fact(space, n, space.values[n], known, ranges)
        if found is not None:
            known[n] = found
    return known


def _fact(
    space: Space, number: int, value: Value, known: Mapping[int, Known], ranges: Ranges
) -> Known | None:
    given = [known.get(i) for i in value.inputs]
    if value.op == "constant":
        return _constant(value)
    if value.op == "iota":
        return _iota(space, value, ranges)
    if value.op == "compare":
        return _compare(value.attrs["direction"], given)
    if value.op in ("and", "or", "not"):
        return _logic(value.op, given)
    if value.op == "select":
        return _select(given)
    if value.dtype.is_integer:
        return _integer(value.op, given)
    return _real(space, value, given)


def _constant(value: Value) -> Known | None:
    number = value.attrs["value"]
    if value.dtype.is_float:
        if float(number) <= LOW_LIMIT:
            return Fact.LOW
        return Fact.ZERO if float(number) == 0 else None
    if isinstance(number, bool | np.bool_):
        return Fact.TRUE if number else Fact.FALSE
    return int(number), int(number)


def _iota(space: Space, value: Value, ranges: Ranges) -> Known | None:
    assert value.walk is not None
    if value.walk.offset.terms or not value.dtype.is_integer:
        return None
    low = high = value.walk.offset.const
    for atom, step in value.walk.strides.items():
        first, end = ranges.get(atom, (0, space.sizes[atom]))
        low += min(step * first, step * (end - 1))
        high += max(step * first, step * (end - 1))
    return low, high


def _compare(direction: str, given: list[Known | None]) -> Known | None:
    a, b = given
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        return None
    test = _COMPARE[direction]
    if direction in ("EQ", "NE"):
        if a[0] == a[1] == b[0] == b[1]:
            return Fact.TRUE if direction == "EQ" else Fact.FALSE
        apart = a[1] < b[0] or b[1] < a[0]
        return (Fact.FALSE if direction == "EQ" else Fact.TRUE) if apart else None
    ends = {bool(test(x, y)) for x in a for y in b}
    return None if len(ends) > 1 else (Fact.TRUE if ends.pop() else Fact.FALSE)


def _logic(op: str, given: list[Known | None]) -> Known | None:
    if op == "not":
        flipped = {Fact.TRUE: Fact.FALSE, Fact.FALSE: Fact.TRUE}
        return flipped.get(given[0]) if isinstance(given[0], Fact) else None
    decides = Fact.FALSE if op == "and" else Fact.TRUE
    if decides in given:
        return decides
    return given[0] if given[0] == given[1] else None


def _select(given: list[Known | None]) -> Known | None:
    pred, on_true, on_false = given
    if pred in (Fact.TRUE, Fact.FALSE):
        return on_true if pred is Fact.TRUE else on_false
    return on_true if on_true == on_false else None


def _integer(op: str, given: list[Known | None]) -> Known | None:
    if op == "convert":
        return given[0] if isinstance(given[0], tuple) else None
    if op not in _ARITHMETIC or not all(isinstance(g, tuple) for g in given):
        return None
    a, b = given
    assert isinstance(a, tuple) and isinstance(b, tuple)
    ends = [int(_ARITHMETIC[op](x, y)) for x in a for y in b]
    return min(ends), max(ends)


def _real(space: Space, value: Value, given: list[Known | None]) -> Known | None:
    low, zero = Fact.LOW in given, Fact.ZERO in given
    if value.op == SCALED:
        return _scaled(value, given[0])
    if value.op == "exponential":
        return Fact.ZERO if low else None
    if value.op == "multiply":
        return Fact.ZERO if zero else None
    if value.op == "divide":
        return Fact.ZERO if given[0] is Fact.ZERO else None
    if value.op == "convert":
        return given[0] if isinstance(given[0], Fact) else None
    if value.op in ("add", "subtract"):
        if given[0] is Fact.LOW or (value.op == "add" and low):
            return Fact.LOW
        return Fact.ZERO if given[0] is Fact.ZERO and given[1] is Fact.ZERO else None
    return None


def _scaled(value: Value, given: Known | None) -> Known | None:
    """func(x * scale + bias): LOW stays LOW under a positive scale, ZERO stays without a bias."""
    func, scale, bias = (value.attrs[k] for k in ("func", "scale", "bias"))
    if given is Fact.LOW and scale is not None and scale > 0:
        return {"exponential": Fact.ZERO, "identity": Fact.LOW}.get(func)
    plain = func == "identity" and bias == 0.0
    return Fact.ZERO if given is Fact.ZERO and plain else None


def exact(space: Space, number: int, ranges: Ranges, axes: tuple[int, int]) -> Any | None:
    """A predicate or integer over all points of two atoms as an array [first axis, second]; None
    when it depends on data or on other atoms.
    """
    value = space.values[number]
    if value.op == "constant":
        return np.asarray(value.attrs["value"]).reshape(1, 1)
    if value.op == "iota":
        return _exact_iota(value, ranges, axes)
    given = [exact(space, i, ranges, axes) for i in value.inputs]
    if any(g is None for g in given):
        return None
    if value.op == "compare":
        return _COMPARE[value.attrs["direction"]](*given)
    if value.op == "not":
        return ~np.asarray(given[0], bool)
    if value.op in _LOGIC:
        return _LOGIC[value.op](*given)
    if value.op in _ARITHMETIC and value.dtype.is_integer:
        return _ARITHMETIC[value.op](*given)
    return given[0] if value.op == "convert" and value.dtype.is_integer else None


def _exact_iota(value: Value, ranges: Ranges, axes: tuple[int, int]) -> Any | None:
    assert value.walk is not None
    if value.walk.offset.terms or not set(value.walk.strides) <= set(axes):
        return None
    total = np.full((1, 1), value.walk.offset.const)
    for at, atom in enumerate(axes):
        if value.walk.stride(atom):
            first, end = ranges[atom]
            line = np.arange(first, end) * value.walk.stride(atom)
            total = total + (line[:, None] if at == 0 else line[None, :])
    return total
