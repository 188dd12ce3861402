"""Masks by position on one core: what follows from counts and a few numbers that lie in memory.

A core's place on a mesh axis is data, and so is all that is computed from it. Yet a causal mask of
its positions is two counts and a number: where counts of two dims meet, the number goes into a
register and whoever reads the plane makes it, as it does with what is made of constants alone. A
line of positions is as quickly read as made, and stays in memory unless planes are made of it. So
does a plane with fewer rows than partitions: made, it would keep rows of several heads apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.facts import (
    counted_dim,
    dim_map,
    is_constant_like,
    operands_of,
    places_of,
)
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.traits import VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.lower.task import PARTITIONS
from shardwright.compiler.support.intervals import Interval, limits

HEAVY = frozenset(
    (
        "cosine",
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "logistic",
        "power",
        "rsqrt",
        "sine",
        "sqrt",
        "tanh",
    )
)
"""What is not rematerialised for every reader."""

Dims = frozenset[int]


@dataclass(slots=True)
class Positions:
    """What one level of a program makes of counts and numbers.

    `ranges` are what integers stay in, `given` the inputs that are made outside, with the dims that
    counts move them along. `wanted` are the planes and all that makes them but counts; `numbers`
    what they read from memory.
    """

    graph: Graph
    ranges: Mapping[Value, Interval]
    given: Mapping[Value, Dims] = field(default_factory=dict)
    wanted: set[Value] = field(default_factory=set)
    numbers: set[Value] = field(default_factory=set)
    _dims: dict[Value, Dims] = field(default_factory=dict)
    _moved: set[Value] = field(default_factory=set)
    """Those of `_dims` that follow from a number."""

    def __post_init__(self) -> None:
        self._dims.update(self.given)
        self._moved.update(self.given)
        for op in self.graph.ops:
            for result in op.results:
                self._note(op, result)
        for op in reversed(self.graph.ops):
            self._want(op)

    def _note(self, op: Op, result: Value) -> None:
        """Dims of a result, where it is made of counts and numbers."""
        read = operands_of(op, result)
        numbers = [v for v in read if self._is_number(v)]
        if not _is_light(op) or not all(v in self._dims or v in numbers for v in read):
            return
        moved = self._moved.intersection(read).union(numbers)
        if moved and self._is_in_memory(op, result):
            return
        self._dims[result] = _dims_of(op, [self._dims.get(v, frozenset()) for v in read])
        self._moved |= {result} if moved else set()

    def _is_in_memory(self, op: Op, result: Value) -> bool:
        """Whether a value that follows from numbers is left to memory: an integer, which is a
        number itself, and what is cut at other places than a number says.
        """
        sums = result.type.num_elements == 1 and OPS[op.name].elementwise
        placed = not self._moved.isdisjoint(places_of(op))
        return (sums and result.type.dtype.is_integer) or placed

    def _is_number(self, value: Value) -> bool:
        """Whether a register can hold the value: an integer that is known to stay in a range."""
        type = value.type
        if value in self._dims or type.num_elements != 1 or type.dtype is not DType.I32:
            return False
        return self.ranges.get(value, limits(type.dtype)) != limits(type.dtype)

    def _want(self, op: Op) -> None:
        """Note what the planes among the results of `op`, or inside of it, are made of."""
        if op.regions:
            self._want_inside(op)
            return
        for result in op.results:
            if result in self._moved and (result in self.wanted or len(self._dims[result]) > 1):
                self._add(result, *operands_of(op, result))

    def _want_inside(self, loop: Op) -> None:
        body = loop.regions[0]
        outside = {body.inputs[i]: loop.operands[i] for i in invariant_carries(loop)}
        given = {v: self._dims[o] for v, o in outside.items() if o in self._moved}
        if given:
            inside = Positions(body, self.ranges, given)
            self._add(*(o for v, o in outside.items() if v in inside.wanted))

    def _add(self, *values: Value) -> None:
        self.wanted.update(v for v in values if v in self._moved)
        self.numbers.update(v for v in values if self._is_number(v))


def _is_light(op: Op) -> bool:
    """True for what is rematerialised for every reader."""
    return is_constant_like(op) and op.name not in HEAVY


def _dims_of(op: Op, read: Sequence[Dims]) -> Dims:
    """The dims of a result that counts move it along, from those of its operands; short ones do not
    count.
    """
    found: set[int] = set().union(*read)
    if (walked := dim_map(op)) is not None:
        found = {d for d, own in enumerate(walked) if own in found}
    elif op.name in VIEWS:
        found = _reshaped(op.operands[0].type.shape, op.result.type.shape, read[0])
    elif (counted := counted_dim(op)) is not None:
        found = {counted}
    return frozenset(d for d in found if op.results[0].type.shape[d] >= PARTITIONS)


def _reshaped(given: Sequence[int], shape: Sequence[int], dims: Dims) -> set[int]:
    """Dims of a reshape that moves no elements but drops or adds dims of 1; of another all that
    share elements with `dims`.
    """
    found: set[int] = set()
    for d in dims:
        inner = _stride(given, d)
        steps = [(e, _stride(shape, e)) for e in range(len(shape))]
        found |= {e for e, s in steps if s < inner * given[d] and s * shape[e] > inner}
    return found


def _stride(shape: Sequence[int], dim: int) -> int:
    return math.prod(shape[dim + 1 :])
