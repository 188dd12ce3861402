"""Copies for far readers within one graph level: unrolled layers, and what a checkpoint computes
again.

The first group of readers keeps the original. Every other group reads a copy made from small values
behind a barrier, which keeps CSE from joining it with the original; groups that are near to each
other (probabilities and exponentials in the backward pass) share one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import UNKNOWN_LOC
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.rewrite import reading, with_ops
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.placement import place_late
from shardwright.compiler.passes.remat.groups import Edge, Readers, lasting
from shardwright.compiler.passes.remat.recipes import (
    Recipe,
    Recipes,
    is_cheap,
    may_repeat,
    repeat,
    shrinks,
)


def remat_at_level(graph: Graph, short_row: int) -> Graph:
    """`graph` in which far readers of quadratic values have copies of their own; loop bodies are
    left as they are.
    """
    return _Remaker(graph, short_row).run()


@dataclass(slots=True, eq=False)
class _Place:
    """Where copies are read: the reads served so far, and what values are called there."""

    edges: list[Edge] = field(default_factory=list)
    now: dict[Value, Value] = field(default_factory=dict)


class _Remaker:
    """One level while copies are added."""

    def __init__(self, graph: Graph, short_row: int) -> None:
        self.graph = graph
        self.recipes = Recipes(graph, short_row)
        self.readers = Readers(graph, [v for op in graph.ops for v in self._rematerialisable(op)])
        self.lasting = lasting(graph)
        self.places: dict[Value, list[_Place]] = {}
        self.copies: list[Op] = []
        self.reads: dict[Op, dict[Value, Value]] = {}

    def _rematerialisable(self, op: Op) -> Sequence[Value]:
        """Results of `op` that a recipe could end in."""
        if not may_repeat(op) or op.regions:
            return ()
        return [v for v in op.results if self.recipes.may_pay(v)]

    def run(self) -> Graph:
        """The level with copies placed in front of their readers."""
        stored = set(self.graph.outputs)
        for value in self.readers.values:
            if value in stored:
                continue
            for group in self.readers.groups(value)[1:]:
                self._serve(value, [op for op in group if not op.regions])
        if not self.copies:
            return self.graph
        ops = [reading(op, self.reads.get(op, {})) for op in self.graph.ops]
        return with_ops(self.graph, place_late([*self.copies, *ops], set(self.copies)))

    def _serve(self, value: Value, group: Sequence[Op]) -> None:
        """Give `group` a copy of `value`, if one pays and the group does not store it anyway."""
        if not group or any(self._keeps(op, value) for op in group):
            return
        first = Edge(value, self.readers.users[value][0])
        recipe = self.recipes.find(value, lambda _: True, lambda x: self.readers.read_far(x, first))
        if recipe is None:
            return
        place = self._place(recipe, value, group)
        for leaf in recipe.leaves:
            self._enter(place, leaf)
        self.copies += repeat(recipe.ops, place.now)
        for op in group:
            self.reads.setdefault(op, {})[value] = place.now[value]

    def _keeps(self, op: Op, value: Value) -> bool:
        """True when what `op` makes of `value` is stored at about its size."""
        return is_cheap(op) and any(r in self.lasting and not shrinks(value, r) for r in op.results)

    def _place(self, recipe: Recipe, value: Value, group: Sequence[Op]) -> _Place:
        """The place near `group` that has most leaves of `recipe`, or a new one."""
        edges = [Edge(value, op) for op in group]
        near = dict.fromkeys(
            place
            for leaf in recipe.leaves
            for place in self.places.get(leaf, ())
            if not self._is_far(place.edges, edges)
        )
        place = max(near, key=lambda p: sum(v in p.now for v in recipe.leaves), default=_Place())
        place.edges += edges
        return place

    def _is_far(self, some: Sequence[Edge], others: Sequence[Edge]) -> bool:
        """True when a reader of one side is far from a reader of the other."""
        return any(
            self.readers.is_far(a, b.reader) or self.readers.is_far(b, a.reader)
            for a in some
            for b in others
        )

    def _enter(self, place: _Place, leaf: Value) -> None:
        """Make `leaf` known at `place`, behind a barrier."""
        if leaf in place.now:
            return
        maker = self.recipes.producers.get(leaf)
        loc = UNKNOWN_LOC if maker is None else maker.loc
        barrier = make_op("optimization_barrier", (leaf,), loc=loc)
        place.now[leaf] = barrier.result
        self.copies.append(barrier)
        self.places.setdefault(leaf, []).append(place)
