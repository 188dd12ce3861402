"""Predicates and counters over positions, which GpSimd makes without tiles for their terms.

A comparison of sums of positions and numbers is one number per point, an offset plus a step per
iter dim, against 0, unless some sum or the number itself may leave 32 bits and wrap. Where all its
readers choose between a float and a constant it becomes a `mask`: a value without code, and each
reader one `affine_select`. What decides masked blocks beforehand (`rows/interval_analysis.py`)
reads the same form.

The counter of random bits is a sum of one count per dim, and of what the rank starts at. As written
it would keep dims apart that every other value walks as one index; GpSimd counts along several dims
at once (documented: NKI reference, `nki.isa.iota`). 32-bit counters wrap, as sums of them do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.domain import (
    MASK,
    AccessMap,
    Count,
    Domain,
    Numbers,
    Rewriting,
    Value,
)
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.support.intervals import Interval, corners, within
from shardwright.compiler.support.walks import answered

NEGATED = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT"}


def fold_masks(domain: Domain) -> None:
    """Turn comparisons that only selects of floats read into masks."""
    users = domain.users(domain.slice(domain.roots))
    for n, value in enumerate(domain.values):
        if value.op != "compare" or n not in users:
            continue
        access = _difference(domain, value)
        if access is not None and all(_is_masked(domain, n, u) for u in users[n]):
            attrs = {"direction": value.attrs["direction"]}
            iter_dims = frozenset(access.strides)
            domain.values[n] = replace(
                value, op=MASK, inputs=(), iter_dims=iter_dims, map=access, attrs=attrs
            )


def _is_masked(domain: Domain, mask: int, reader: int) -> bool:
    """Whether `reader` is a float where the mask says so, and a constant elsewhere."""
    value = domain[reader]
    if value.op != "select" or not value.dtype.is_float or mask in value.inputs[1:]:
        return False
    return sum(domain[i].op == "constant" for i in value.inputs[1:]) == 1


@dataclass(frozen=True, slots=True)
class _Position:
    """A 32-bit integer that follows from positions, and what it may be."""

    count: Count
    range: Interval


def reach(domain: Domain, access: AccessMap, ranges: Mapping[int, Interval]) -> Interval | None:
    """The range of an access map in the (first, end) of each iter dim; None with registers."""
    if access.offset.terms:
        return None
    low = high = access.offset.const
    for iter_dim, step in access.strides.items():
        first, end = ranges.get(iter_dim, (0, domain.sizes[iter_dim]))
        low += min(step * first, step * (end - 1))
        high += max(step * first, step * (end - 1))
    return low, high


def _difference(domain: Domain, value: Value) -> AccessMap | None:
    """a - b of a comparison of positions, where some iter dim moves it."""
    found = _sum([_position(domain, i) for i in value.inputs], -1)
    return AccessMap(found.count.start, found.count.steps) if found and found.count.steps else None


def _position(domain: Domain, number: int) -> _Position | None:
    """What a value is as a position; None when it is none, or may wrap."""
    known: dict[int, _Position | None] = {}

    def terms(n: int) -> Numbers:
        value = domain[n]
        adds_up = value.dtype is DType.I32 and value.op in ("add", "subtract")
        return value.inputs if adds_up else ()

    return answered(number, known, terms, lambda n: _position_from(domain, n, known))


def _position_from(
    domain: Domain, number: int, known: Mapping[int, _Position | None]
) -> _Position | None:
    value = domain[number]
    if value.dtype is not DType.I32:
        return None
    if value.op in ("add", "subtract"):
        return _sum([known[i] for i in value.inputs], 1 if value.op == "add" else -1)
    count = _plain(value)
    if count is None:
        return None
    moved = value.op == "register"
    range = None if moved else reach(domain, AccessMap(count.start, count.steps), {})
    return _in_word(count, range or _told(value))


def _plain(value: Value) -> Count | None:
    """An integer that follows from nothing else."""
    match value.op:
        case "iota":
            return Count(value.access.offset, value.access.strides)
        case "constant":
            return Count(Affine(int(value.attrs["value"])))
        case "register":
            return Count(value.attrs["value"])
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


def fold_counters(domain: Domain) -> None:
    """Turn counters of generators of random bits into one count each, and what is loaded."""
    domain.values = _Folding(domain).run().values


class _Folding(Rewriting):
    def __init__(self, domain: Domain) -> None:
        super().__init__(domain)
        counters = {v.inputs[0] for v in domain.values if v.op == "random_bits"}
        known: dict[int, Count | None] = {}
        self.found = {n: _count(domain, n, known) for n in counters if domain[n].op != "iota"}

    def made(self, n: int, value: Value) -> int:
        """A counter as the count that it is."""
        count = self.found.get(n)
        if count is None or not count.steps:
            return self.add(value)
        plain = replace(value, inputs=(), attrs={})
        scalar = replace(plain, iter_dims=frozenset())
        access = AccessMap(count.start, count.steps)
        last = self.add(replace(plain, op="iota", iter_dims=frozenset(count.steps), map=access))
        for loaded, factor in count.loaded.items():
            by = self.add(replace(scalar, op="constant", attrs={"value": factor % 2**32}))
            inputs = (self.number[loaded], by)
            product = self.add(replace(scalar, op="multiply", inputs=inputs))
            last = self.add(replace(plain, op="add", inputs=(last, product)))
        return last


def _count(domain: Domain, number: int, known: dict[int, Count | None]) -> Count | None:
    """What a value is as a count; None when it is something else. `known` are answers so far."""

    def terms(n: int) -> Numbers:
        value = domain[n]
        adds_up = value.dtype is DType.U32 and value.op in ("add", "multiply")
        return value.inputs if adds_up else ()

    return answered(number, known, terms, lambda n: _count_from(domain, n, known))


def _count_from(domain: Domain, number: int, known: Mapping[int, Count | None]) -> Count | None:
    value = domain[number]
    if value.dtype is not DType.U32:
        return None
    if value.op in ("add", "multiply"):
        a, b = (known[i] for i in value.inputs)
        if a is not None and b is not None:
            return a.plus(b) if value.op == "add" else a.product(b)
    loaded = None if value.iter_dims else Count(loaded={number: 1})
    return _plain(value) or loaded
