"""What is known of the values of one level without running it: constants, counts, repetitions.

Values that a loop only passes on are known inside of it, when they are constants or counts. Unlike
the labels of `sharding/indices/dims.py`, these facts are proofs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.facts import counted_dim, dim_map
from shardwright.compiler.ir.topological import topological
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.support.intervals import Interval
from shardwright.sharding.indices.repeats import Repeats


@dataclass(slots=True)
class Level:
    """A graph level, the ops that made its values, and the ranges of its integers."""

    graph: Graph
    made: Mapping[Value, Op]
    ranges: Mapping[Value, Interval]
    _repeats: Repeats | None = None

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
        if self._repeats is None:
            self._repeats = Repeats(self.made)
        return self._repeats.along(value, dim)

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
