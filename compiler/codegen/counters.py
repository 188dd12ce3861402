"""Counters of random bits as one `iota` each, over all atoms that move them.

The position of an element is a sum of one count per dim, and of what the rank starts at. As written
it would keep dims apart that every other value walks as one index, and cost an instruction per dim;
GpSimd counts along several dims at once (documented: NKI reference, `nki.isa.iota`). 32-bit
counters wrap, as sums of them do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.codegen.domain import Count, Rewriting, Space, Value, Walk
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.region import Affine
from shardwright.compiler.support.walks import answered


def fold_counters(space: Space) -> None:
    """Turn the counter of every generator of random bits that is a sum of counts and numbers into
    one count, and a number where some are loaded.
    """
    space.values = _Folding(space).run().values


class _Folding(Rewriting):
    def __init__(self, space: Space) -> None:
        super().__init__(space)
        counters = {v.inputs[0] for v in space.values if v.op == "random_bits"}
        known: dict[int, Count | None] = {}
        self.found = {n: _count(space, n, known) for n in counters if space[n].op != "iota"}

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


def _count(space: Space, number: int, known: dict[int, Count | None]) -> Count | None:
    """What a value is as a count; None when it is something else. `known` are answers so far."""

    def terms(n: int) -> tuple[int, ...]:
        value = space[n]
        adds_up = value.dtype is DType.U32 and value.op in ("add", "multiply")
        return value.inputs if adds_up else ()

    return answered(number, known, terms, lambda n: _count_from(space, n, known))


def _count_from(space: Space, number: int, known: Mapping[int, Count | None]) -> Count | None:
    value = space[number]
    if value.dtype is not DType.U32:
        return None
    if value.op == "iota":
        return Count(value.access.offset, value.access.strides)
    if value.op == "constant":
        return Count(Affine(int(value.attrs["value"])))
    if value.op == "register":
        return Count(value.attrs["value"])
    if value.op in ("add", "multiply"):
        a, b = (known[i] for i in value.inputs)
        if a is not None and b is not None:
            return a.plus(b) if value.op == "add" else a.product(b)
    return None if value.atoms else Count(loaded={number: 1})
