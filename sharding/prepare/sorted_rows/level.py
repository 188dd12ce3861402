"""What is known of the values of one level without running it: constants, counts, repetitions.

Values that a loop only passes on are known inside of it, when they are constants or counts. Unlike
the labels of `sharding/indices/dims.py`, these facts are proofs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.ir.analysis import invariant_carries, known_elements
from shardwright.compiler.ir.facts import counted_dim, dim_map, splat, stored
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.topological import topological
from shardwright.compiler.ir.traits import LITERALS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.support.intervals import Interval
from shardwright.compiler.support.walks import answered
from shardwright.sharding.indices.dims import factors

MOST = 1 << 24  # elements of a table of places; larger lists of rows are not proven


@dataclass(slots=True)
class Level:
    """A graph level, the ops that made its values, and the ranges of its integers."""

    graph: Graph
    made: Mapping[Value, Op]
    ranges: Mapping[Value, Interval]
    _repeats: dict[tuple[Value, int], bool] = field(default_factory=dict)

    def inside(self, loop: Op) -> Level:
        """The level of a loop's body."""
        body = loop.regions[0]
        made = {}
        for i in invariant_carries(loop):
            outer = self.made.get(loop.operands[i])
            if outer is not None and not outer.operands:
                made[body.inputs[i]] = outer
        return Level(body, {**made, **body.producers()}, self.ranges)

    def repeats(self, value: Value, dim: int) -> bool:
        """True when a value is proven to be the same along `dim`."""
        return answered((value, dim), self._repeats, self._read, self._is_repeated)

    def _read(self, asked: tuple[Value, int]) -> list[tuple[Value, int]]:
        """The dims that have to be repetitions for a dim to be one."""
        value, dim = asked
        op = self.made.get(value)
        if op is None or value.type.shape[dim] == 1:
            return []
        if (walked := dim_map(op)) is not None:
            return [(op.operands[0], d) for d in walked[dim : dim + 1] if d is not None]
        along = [f for f in factors(op) if asked in f] if OPS[op.name].elementwise else []
        return [(v, d) for f in along for v, d in f if v is not value]

    def _is_repeated(self, asked: tuple[Value, int]) -> bool:
        value, dim = asked
        op = self.made.get(value)
        if value.type.shape[dim] == 1 or op is None:
            return value.type.shape[dim] == 1
        if op.name in LITERALS:
            if splat(op) is not None or counted_dim(op) is not None:
                return counted_dim(op) != dim
            whole = elements(self, value)
            return whole is not None and not varies(whole, dim)
        follows = dim_map(op) is not None or OPS[op.name].elementwise
        return follows and all(self._repeats[one] for one in self._read(asked))

    def peeled(self, value: Value) -> tuple[Value, tuple[int, ...]]:
        """What a value repeats, and where the dims of that are in it."""
        dims = tuple(range(value.type.rank))
        while (op := self.made.get(value)) is not None and (walked := dim_map(op)) is not None:
            place = {d: dims[i] for i, d in enumerate(walked) if d is not None}
            (source,) = op.operands
            if len(place) < source.type.rank:  # a dim of it is stretched
                break
            dims = tuple(place[d] for d in range(source.type.rank))
            value = source
        return value, dims


def is_count(level: Level, value: Value, dim: int) -> bool:
    """True for 0, 1, 2, ... along `dim`."""
    return counted_dim(level.made.get(value)) == dim


def varies(array: np.ndarray, dim: int) -> bool:
    """True when an array is not the same along `dim`."""
    return bool((array != np.take(array, [0], dim)).any())


def elements(level: Level, value: Value) -> np.ndarray | None:
    """The elements of a value of constants and counts; None for others, and for large ones."""
    held = stored(level.made.get(value))
    if held is not None and value.type.num_elements <= MOST:
        return held.array()
    return known_elements(level.made, value)


def masks_behind(graph: Graph, sort_of: Mapping[Op, Op]) -> list[Op]:
    """The ops of a level in program order, but every mask of segments behind its sort, in front of
    which it may stand as a comparison of places; what a sort and its mask need of each other is
    missing.
    """
    made = graph.producers()
    place = {op: i for i, op in enumerate(graph.ops)}
    before = {op: {made[v] for v in op.operands if v in made} for op in graph.ops}
    for mask, sort in sort_of.items():
        before[mask].add(sort)
    return topological(before, place.__getitem__)
