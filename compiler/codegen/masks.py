"""Predicates over positions that need no tile: GpSimd decides them as it applies the mask.

A comparison of sums of positions and numbers is one number per point, an offset plus a step per
atom, against 0, unless some sum or the number itself may leave 32 bits and wrap. Where all its
readers choose between a float and a constant it becomes a `mask`: a value without code, and each
reader one `affine_select`. What decides masked blocks beforehand (`rows/facts.py`) reads the same
form. Next: `values.py` for everything else a value may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.domain import MASK, Count, Space, Value, Walk
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.region import Affine
from shardwright.compiler.support.intervals import Interval, corners, within
from shardwright.compiler.support.walks import answered

NEGATED = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT"}


def fold_masks(space: Space) -> None:
    """Turn comparisons that only selects of floats read into masks."""
    users = space.users(space.slice(space.sinks))
    for n, value in enumerate(space.values):
        if value.op != "compare" or n not in users:
            continue
        walk = _difference(space, value)
        if walk is not None and all(_is_masked(space, n, u) for u in users[n]):
            attrs = {"direction": value.attrs["direction"]}
            atoms = frozenset(walk.strides)
            space.values[n] = replace(
                value, op=MASK, inputs=(), atoms=atoms, walk=walk, attrs=attrs
            )


def _is_masked(space: Space, mask: int, reader: int) -> bool:
    """Whether `reader` is a float where the mask says so, and a constant elsewhere."""
    value = space[reader]
    if value.op != "select" or not value.dtype.is_float or mask in value.inputs[1:]:
        return False
    return sum(space[i].op == "constant" for i in value.inputs[1:]) == 1


@dataclass(frozen=True, slots=True)
class _Position:
    """A 32-bit integer that follows from positions, and what it may be."""

    count: Count
    range: Interval


def reach(space: Space, walk: Walk, ranges: Mapping[int, Interval]) -> Interval | None:
    """The least and the largest number of a walk where each atom stays in its range (first, end);
    None where registers move it.
    """
    if walk.offset.terms:
        return None
    low = high = walk.offset.const
    for atom, step in walk.strides.items():
        first, end = ranges.get(atom, (0, space.sizes[atom]))
        low += min(step * first, step * (end - 1))
        high += max(step * first, step * (end - 1))
    return low, high


def _difference(space: Space, value: Value) -> Walk | None:
    """a - b of a comparison of positions, where some atom moves it."""
    found = _sum([_position(space, i) for i in value.inputs], -1)
    return Walk(found.count.start, found.count.steps) if found and found.count.steps else None


def _position(space: Space, number: int) -> _Position | None:
    """What a value is as a position; None when it is none, or may wrap."""
    known: dict[int, _Position | None] = {}

    def terms(n: int) -> tuple[int, ...]:
        value = space[n]
        adds_up = value.dtype is DType.I32 and value.op in ("add", "subtract")
        return value.inputs if adds_up else ()

    return answered(number, known, terms, lambda n: _position_from(space, n, known))


def _position_from(
    space: Space, number: int, known: Mapping[int, _Position | None]
) -> _Position | None:
    value = space[number]
    if value.dtype is not DType.I32:
        return None
    match value.op:
        case "iota":
            walk = value.access
            range = reach(space, walk, {}) or _told(value)
            return _in_word(Count(walk.offset, walk.strides), range)
        case "constant":
            only = int(value.attrs["value"])
            return _in_word(Count(Affine(only)), (only, only))
        case "register":
            return _in_word(Count(value.attrs["value"]), _told(value))
        case "add" | "subtract":
            given = [known[i] for i in value.inputs]
            return _sum(given, 1 if value.op == "add" else -1)
    return None


def _told(value: Value) -> Interval | None:
    """What is known of a number that registers move."""
    known = value.attrs
    return (known["low"], known["high"]) if "low" in known else None


def _in_word(count: Count, range: Interval | None) -> _Position | None:
    kept = within(range, DType.I32)
    return None if kept is None else _Position(count, kept)


def _sum(given: Sequence[_Position | None], sign: int) -> _Position | None:
    """a + sign * b."""
    a, b = given
    if a is None or b is None:
        return None
    range = corners(lambda x, y: x + sign * y, a.range, b.range)
    return _in_word(a.count.plus(b.count.times(sign)), range)
