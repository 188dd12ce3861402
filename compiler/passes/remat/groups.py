"""Which readers of a value can share it, and which are so far away that it would have to wait in
memory.

A reader is far from an earlier one when it depends on it through a contraction whose result is
small beside the value: the backward pass of attention depends on its output, the next layer on this
one. Such readers can never be in one loop fusion, so each such group is better off with a copy of
its own. A cheap op stands where it is needed first, not where the program has it: what only the
backward pass wants of the scores belongs there. Dependences are bit sets, one bit per (value,
reader).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_

from shardwright.compiler.ir.traits import UPDATES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.remat.recipes import RATIO, contracts, is_cheap, shrinks


@dataclass(frozen=True, slots=True)
class Edge:
    """One read: `reader` reads `value`."""

    value: Value
    reader: Op


class Readers:
    """Who reads the values of one level, and how far apart."""

    def __init__(self, graph: Graph, values: Sequence[Value]) -> None:
        users = self.users = graph.uses()
        shared = (v for v in values if len(users.get(v, ())) > 1)
        chosen = sorted(shared, key=lambda v: v.type.num_bytes)
        self.values = chosen  # those with several readers, smallest first
        self._sizes = [v.type.num_bytes for v in chosen for _ in users[v]]
        edges = [Edge(v, op) for v in chosen for op in users[v]]
        self._bit = {edge: 1 << i for i, edge in enumerate(edges)}
        self._far: dict[Op, int] = {}
        self._place: dict[Op, int] = {}
        self._spread(graph, edges)
        self._delay(graph)
        self._ops = graph.ops

    def _spread(self, graph: Graph, edges: Sequence[Edge]) -> None:
        """Carry bits from operands to results; at a contraction those of much larger values become
        far.
        """
        own: dict[Op, int] = {}
        for edge in edges:
            own[edge.reader] = own.get(edge.reader, 0) | self._bit[edge]
        near: dict[Value, int] = {}
        far: dict[Value, int] = {}
        for op in graph.ops:
            close, distant = own.get(op, 0), 0
            for v in op.operands:
                close |= near.get(v, 0)
                distant |= far.get(v, 0)
            self._far[op] = distant
            if not close | distant:
                continue
            contracted = contracts(op)
            for result in op.results:
                moved = close & self._at_least(result.type.num_bytes * RATIO) if contracted else 0
                near[result], far[result] = close & ~moved, distant | moved

    def _delay(self, graph: Graph) -> None:
        """Move cheap ops to their first reader: they are far from whatever all readers are far
        from.
        """
        stored = set(graph.outputs)
        for position, op in reversed(list(enumerate(graph.ops))):
            self._place[op] = position
            readers = [u for v in op.results for u in self.users.get(v, ())]
            if not readers or not is_cheap(op) or any(v in stored for v in op.results):
                continue
            self._place[op] = min(self._place[u] for u in readers)
            self._far[op] |= reduce(and_, (self._far[u] for u in readers))

    def _at_least(self, size: int) -> int:
        """Bits of the edges of values of `size` bytes or more."""
        smaller = bisect_right(self._sizes, size - 1)
        return (1 << len(self._sizes)) - (1 << smaller)

    def is_far(self, edge: Edge, op: Op) -> bool:
        """True when `op` depends on the reader of `edge` through a contraction that is small beside
        the value.
        """
        return bool(self._far[op] & self._bit[edge])

    def read_far(self, value: Value, edge: Edge) -> bool:
        """True when something far from `edge` reads `value`, directly or through cheap ops."""
        return bool(self._behind.get(value, 0) & self._bit[edge])

    @cached_property
    def _behind(self) -> dict[Value, int]:
        """Per value, what is far from its readers, and from those of what cheap ones make of it."""
        found: dict[Value, int] = {}
        for op in reversed(self._ops):
            far = self._far[op]
            for result in op.results if is_cheap(op) else ():
                far |= found.get(result, 0)
            for value in op.operands:
                found[value] = found.get(value, 0) | far
        return found

    def groups(self, value: Value) -> list[list[Op]]:
        """Readers of `value` in order of place, split where they are far from one another."""
        found: list[list[Op]] = []
        reads = 0  # of the last group
        for op in sorted(self.users.get(value, ()), key=self._place.__getitem__):
            if found and not self._far[op] & reads:
                found[-1].append(op)
            else:
                found.append([op])
                reads = 0
            reads |= self._bit.get(Edge(value, op), 0)
        return found


def lasting(graph: Graph) -> set[Value]:
    """Values that reach an output by cheap ops alone: something of their size is stored."""
    found = set(graph.outputs)
    for op in reversed(graph.ops):
        if not (is_cheap(op) or op.name in UPDATES):
            continue
        for result in op.results:
            if result in found:
                found.update(v for v in op.operands if not shrinks(v, result))
    return found
