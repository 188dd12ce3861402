"""Interval analysis: what is known of a kernel's values on a box of points.

Predicates over iotas are decided by intervals; a select with a decided predicate is one of its
branches. What is exactly zero is ZERO; other floats have an interval when constants may take them
far from data, and are LOW when their exponential is zero (`float_intervals.py`).
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from shardwright.compiler.codegen.domain import MASK, SCALED, Domain, Numbers, Value
from shardwright.compiler.codegen.positions import reach
from shardwright.compiler.codegen.rows import float_intervals
from shardwright.compiler.codegen.rows.float_intervals import DATA, FloatInterval
from shardwright.compiler.support.intervals import Interval, corners, within
from shardwright.compiler.support.walks import answered


class Fact(enum.Enum):
    """A value that is the same kind of thing everywhere in a box."""

    TRUE = "true"
    FALSE = "false"
    ZERO = "zero"


Known = Fact | Interval | FloatInterval
Facts = Mapping[int, Known]
Given = list[Known | None]
Range = tuple[int, int]  # first point, end
Ranges = Mapping[int, Range]
Operator = Callable[[Any, Any], Any]
_ARITHMETIC: dict[str, Operator] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}
_COMPARE: dict[str, Operator] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_LOGIC: dict[str, Operator] = {"and": np.logical_and, "or": np.logical_or}


def is_low(known: Known | None) -> bool:
    """Whether the exponential of what is known is zero."""
    return isinstance(known, FloatInterval) and known.is_low


def facts(
    domain: Domain,
    numbers: Iterable[int],
    ranges: Ranges,
    whole: Facts | None = None,
    given: Facts | None = None,
) -> dict[int, Known]:
    """What is known of the values `numbers` (in order) where each iter dim stays in its range;
    `whole` is what is known of them everywhere, which is what reductions read. Some may be `given`.
    """
    known: dict[int, Known] = dict(given or {})
    for n in (n for n in numbers if n not in known):
        value = domain[n]
        if value.op in ("reduce", "contract") and value.dtype.is_float:
            reads = known if whole is None else whole
            found: Known | None = _told(_reduced(value, reads))
        else:
            found = _fact(domain, value, known, ranges)
        if found is not None:
            known[n] = found
    return known


def _fact(domain: Domain, value: Value, known: Facts, ranges: Ranges) -> Known | None:
    given = [known.get(i) for i in value.inputs]
    if value.op == "constant":
        return _constant(value)
    if value.op == "iota" and value.dtype.is_integer:
        return within(_access_range(domain, value, ranges), value.dtype)
    if value.op == "compare":
        return _compare(value.attrs["direction"], given)
    if value.op == MASK:
        return _compare(value.attrs["direction"], [_access_range(domain, value, ranges), (0, 0)])
    if value.op in ("and", "or", "not"):
        return _logic(value.op, given)
    if value.op == "select":
        return _select(value, given)
    if value.dtype.is_integer:
        return within(_integer(value.op, given), value.dtype)
    return _real(domain, value, given) if value.dtype.is_float and given else None


def _constant(value: Value) -> Known | None:
    number = value.attrs["value"]
    if value.dtype.is_float:
        real = float(number)
        return Fact.ZERO if real == 0 else _told(float_intervals.interval(real, real))
    if isinstance(number, bool | np.bool_):
        return Fact.TRUE if number else Fact.FALSE
    return int(number), int(number)


def _access_range(domain: Domain, value: Value, ranges: Ranges) -> Interval | None:
    """What the access map of an iota or a mask runs through; a mask's is within 32 bits."""
    return reach(domain, value.access, ranges)


def _compare(direction: str, given: Given) -> Known | None:
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


def _logic(op: str, given: Given) -> Known | None:
    if op == "not":
        flipped = {Fact.TRUE: Fact.FALSE, Fact.FALSE: Fact.TRUE}
        return flipped.get(given[0]) if isinstance(given[0], Fact) else None
    decides = Fact.FALSE if op == "and" else Fact.TRUE
    if decides in given:
        return decides
    return given[0] if given[0] == given[1] and isinstance(given[0], Fact) else None


def _select(value: Value, given: Given) -> Known | None:
    pred, on_true, on_false = given
    if pred in (Fact.TRUE, Fact.FALSE):
        return on_true if pred is Fact.TRUE else on_false
    if on_true == on_false:
        return on_true
    if not value.dtype.is_float:
        return None
    return _told(float_intervals.either(interval_of(on_true), interval_of(on_false)))


def _integer(op: str, given: Given) -> Interval | None:
    """What an integer would be if its type had no end."""
    if op == "convert":
        return given[0] if isinstance(given[0], tuple) else None
    if op not in _ARITHMETIC or not all(isinstance(g, tuple) for g in given):
        return None
    a, b = given
    assert isinstance(a, tuple) and isinstance(b, tuple)
    return corners(_ARITHMETIC[op], a, b)


def interval_of(known: Known | None) -> FloatInterval:
    """The interval of a float, or of an integer that becomes one; that one is never LOW."""
    if isinstance(known, FloatInterval):
        return known
    return FloatInterval(min(known[0], 0), max(known[1], 0)) if isinstance(known, tuple) else DATA


def _told(found: FloatInterval) -> FloatInterval | None:
    """Data is what nothing is known of."""
    return None if found == DATA else found


def _reduced(value: Value, whole: Facts) -> FloatInterval:
    """A maximum is not LOW: columns are left out only where every row keeps one that is not masked.
    A sum, a product or a minimum over masked columns may be as far from data as the mask is.
    """
    given = [interval_of(whole.get(i)) for i in value.inputs]
    if value.op == "reduce" and value.attrs["kind"] == "max":
        return float_intervals.exponential(given[0])
    return float_intervals.other(*given)


def _real(domain: Domain, value: Value, given: Given) -> Known | None:
    if value.op == SCALED:
        return _scaled(value, given)
    if value.op == "exponential":
        return _exponential(interval_of(given[0]))
    if _is_zero(value.op, given):
        return Fact.ZERO
    if value.op == "convert" and not isinstance(given[0], Fact):
        return _told(interval_of(given[0]))
    return _told(_arithmetic(domain, value, [interval_of(g) for g in given]))


def _is_zero(op: str, given: Given) -> bool:
    """Zero times an infinite constant is no number, so it is not zero."""
    if op == "multiply":
        return Fact.ZERO in given and all(interval_of(g).is_finite for g in given)
    if op in ("add", "subtract"):
        return all(g is Fact.ZERO for g in given)
    return op in ("divide", "convert") and given[0] is Fact.ZERO


def _exponential(given: FloatInterval) -> Known | None:
    return Fact.ZERO if given.is_low else _told(float_intervals.exponential(given))


def _arithmetic(domain: Domain, value: Value, given: list[FloatInterval]) -> FloatInterval:
    a, b = given[0], given[-1]
    numbers = [_number(domain, i) for i in value.inputs]
    match value.op:
        case "add":
            return float_intervals.added(a, b)
        case "subtract":
            return float_intervals.added(a, float_intervals.times(b, -1.0))
        case "negate":
            return float_intervals.times(a, -1.0)
        case "maximum":
            return float_intervals.greater(a, b)
        case "minimum":
            return float_intervals.lesser(a, b)
        case "multiply" if numbers[1] is not None:
            return float_intervals.times(a, numbers[1])
        case "multiply" if numbers[0] is not None:
            return float_intervals.times(b, numbers[0])
        case "divide" if numbers[1]:
            return float_intervals.times(a, 1.0 / numbers[1])
    return float_intervals.other(*given)


def _number(domain: Domain, number: int) -> float | None:
    """The constant a value is, also converted; None if it is none."""
    value = domain[number]
    if value.op == "convert" and value.dtype.is_float:
        return _number(domain, value.inputs[0])
    return float(value.attrs["value"]) if value.op == "constant" else None


def _scaled(value: Value, given: Given) -> Known | None:
    """func(x * scale + bias); a scale or bias of None is a further input."""
    func, scale, bias = (value.attrs[k] for k in ("func", "scale", "bias"))
    if given[0] is Fact.ZERO and func == "identity" and bias == 0.0:
        return Fact.ZERO
    rest = [interval_of(g) for g in given[1:]]
    x = interval_of(given[0])
    x = float_intervals.other(x, rest.pop(0)) if scale is None else float_intervals.times(x, scale)
    last = rest.pop(0) if bias is None else float_intervals.interval(bias, bias)
    x = float_intervals.added(x, last)
    if func == "exponential":
        return _exponential(x)
    return _told(x if func == "identity" else float_intervals.other(x))


def exact(domain: Domain, number: int, ranges: Ranges, axes: tuple[int, int]) -> Any | None:
    """A predicate or integer over all points of two iter dims as an array [first axis, second], in
    its type, where sums wrap; None when it depends on data or on other iter dims.
    """
    known: dict[int, Any | None] = {}

    def read(n: int) -> Numbers:
        value = domain[n]
        return () if value.op in (MASK, "constant", "iota") else value.inputs

    return answered(number, known, read, lambda n: _exact(domain[n], ranges, axes, known))


def _exact(
    value: Value, ranges: Ranges, axes: tuple[int, int], known: Mapping[int, Any | None]
) -> Any | None:
    if value.op == MASK:
        exact = _exact_access(value, ranges, axes)
        return None if exact is None else _COMPARE[value.attrs["direction"]](exact, 0)
    if value.op == "constant":
        found: Any = np.asarray(value.attrs["value"]).reshape(1, 1)
    elif value.op == "iota":
        found = _exact_access(value, ranges, axes)
    else:
        found = _exact_sum(value, [known[i] for i in value.inputs])
    if found is None or value.dtype.is_float:
        return None
    return found.astype(value.dtype.numpy)


def _exact_sum(value: Value, given: list[Any]) -> Any | None:
    """What follows from other values; numbers may be of a wider type."""
    if not given or any(g is None for g in given):
        return None
    if value.op == "compare":
        return _COMPARE[value.attrs["direction"]](*given)
    if value.op == "convert":
        return given[0] if value.dtype.is_integer else None
    if value.dtype.is_integer:
        return _ARITHMETIC[value.op](*given) if value.op in _ARITHMETIC else None
    if value.op == "not":
        return np.logical_not(given[0])
    return _LOGIC[value.op](*given) if value.op in _LOGIC else None


def _exact_access(value: Value, ranges: Ranges, axes: tuple[int, int]) -> Any | None:
    access = value.access
    if access.offset.terms or not set(access.strides) <= set(axes):
        return None
    total = np.full((1, 1), access.offset.const)
    for at, iter_dim in enumerate(axes):
        if access.stride(iter_dim):
            line = np.arange(*ranges[iter_dim]) * access.stride(iter_dim)
            total = total + (line[:, None] if at == 0 else line[None, :])
    return total
