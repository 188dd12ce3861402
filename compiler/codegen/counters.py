"""Counters of random bits as one `iota` each, over all atoms that move them.

The position of an element is a sum of one count per dim, and of what the rank starts at. As written
it would keep dims apart that every other value walks as one index, and cost an instruction per dim;
GpSimd counts along several dims at once (documented: NKI reference, `nki.isa.iota`). 32-bit
counters wrap, as sums of them do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwright.compiler.codegen.domain import Rewriting, Space, Value, Walk
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.region import Affine
from shardwright.compiler.support.walks import answered


@dataclass(frozen=True, slots=True)
class _Count:
    """start + a step per atom + a factor per loaded number (by value)."""

    start: Affine = field(default_factory=Affine)
    steps: Mapping[int, int] = field(default_factory=dict)
    loaded: Mapping[int, int] = field(default_factory=dict)

    @property
    def number(self) -> int | None:
        """The constant this is; None for others."""
        return None if self.steps or self.loaded or self.start.terms else self.start.const

    def plus(self, other: _Count) -> _Count:
        """The sum."""
        steps, loaded = _added(self.steps, other.steps), _added(self.loaded, other.loaded)
        return _Count(self.start + other.start, steps, loaded)

    def times(self, factor: int) -> _Count:
        """The multiple."""
        steps = {atom: step * factor for atom, step in self.steps.items() if factor}
        loaded = {n: step * factor for n, step in self.loaded.items() if factor}
        return _Count(self.start * factor, steps, loaded)


def _added(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    total = {key: a.get(key, 0) + b.get(key, 0) for key in sorted({*a, *b})}
    return {key: value for key, value in total.items() if value}


def fold_counters(space: Space) -> None:
    """Turn the counter of every generator of random bits that is a sum of counts and numbers into
    one count, and a number where some are loaded.
    """
    space.values = _Folding(space).run().values


class _Folding(Rewriting):
    def __init__(self, space: Space) -> None:
        super().__init__(space)
        counters = {v.inputs[0] for v in space.values if v.op == "random_bits"}
        known: dict[int, _Count | None] = {}
        self.found = {n: _count(space, n, known) for n in counters if space.values[n].op != "iota"}

    def made(self, n: int, value: Value) -> int:
        """A counter as the count that it is."""
        count = self.found.get(n)
        if count is None or not count.steps:
            return self.add(value)
        plain = replace(value, inputs=(), attrs={})
        scalar = replace(plain, atoms=frozenset())
        walk = Walk(count.start, count.steps)
        last = self.add(replace(plain, op="iota", atoms=frozenset(count.steps), walk=walk))
        for loaded, factor in count.loaded.items():
            by = self.add(replace(scalar, op="constant", attrs={"value": factor % 2**32}))
            inputs = (self.number[loaded], by)
            product = self.add(replace(scalar, op="multiply", inputs=inputs))
            last = self.add(replace(plain, op="add", inputs=(last, product)))
        return last


def _count(space: Space, number: int, known: dict[int, _Count | None]) -> _Count | None:
    """What a value is as a count; None when it is something else. `known` are answers so far."""

    def terms(n: int) -> tuple[int, ...]:
        value = space.values[n]
        adds_up = value.dtype is DType.U32 and value.op in ("add", "multiply")
        return value.inputs if adds_up else ()

    return answered(number, known, terms, lambda n: _count_from(space, n, known))


def _count_from(space: Space, number: int, known: Mapping[int, _Count | None]) -> _Count | None:
    value = space.values[number]
    if value.dtype is not DType.U32:
        return None
    if value.op == "iota":
        return _Count(value.access.offset, value.access.strides)
    if value.op == "constant":
        return _Count(Affine(int(value.attrs["value"])))
    if value.op == "register":
        return _Count(value.attrs["value"])
    if value.op in ("add", "multiply"):
        a, b = (known[i] for i in value.inputs)
        if a is not None and b is not None:
            return a.plus(b) if value.op == "add" else _product(a, b)
    return None if value.atoms else _Count(loaded={number: 1})


def _product(a: _Count, b: _Count) -> _Count | None:
    """The multiple of one by the other, where that is a constant."""
    if a.number is not None:
        return b.times(a.number)
    return None if b.number is None else a.times(b.number)
