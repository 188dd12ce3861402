"""One index of the model, wherever it appears: dims that always walk together, over the whole
graph.

A class is a set of (value, dim) that ops tie together at equal size: the heads, the feed-forward
columns, the vocabulary, in whatever spelling. A dim that a reshape splits or merges is a product:
its class knows the classes of its parts, major first. A family is what shares a major part, so that
splitting one member over cores splits them all at the same places. What strategies give to mesh
axes are families; docs/design/0030-strategies.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from operator import mul

from shardwright.compiler.ir.ops import ReshapeAttrs
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.indices.dim_sets import DimSets, DimTable
from shardwright.sharding.indices.dims import Dim

Class = Dim
"""A class is named by one of its dims."""


class IndexClasses:
    """Classes of the dims of every value of a graph, loop bodies included."""

    def __init__(self, graph: Graph, table: DimTable | None = None) -> None:
        self._graph = graph
        self._table = table
        self._known: dict[tuple[Value, int], tuple[tuple[int, Class], ...]] = {}

    @cached_property
    def _sets(self) -> tuple[DimSets, DimSets]:
        """Classes (dims of equal size) and families; found when first asked for, since many meshes
        never ask.
        """
        table = self._table or DimTable(self._graph)
        return table.sets(table.own, same_size=True), table.sets(table.own)

    @cached_property
    def parts(self) -> dict[Class, tuple[Class, ...]]:
        """The classes a product is made of, major first."""
        found: dict[Class, tuple[Class, ...]] = {}
        for op in self._graph.walk():
            for whole, parts in _products(op):
                found.setdefault(self.of(whole), tuple(self.of(d) for d in parts))
        return found

    @cached_property
    def _values(self) -> tuple[Value, ...]:
        """Every value that an op reads or makes."""
        ops = self._graph.walk()
        return tuple(dict.fromkeys(v for op in ops for v in (*op.operands, *op.results)))

    def of(self, dim: Dim) -> Class:
        """The class of a dim."""
        return self._sets[0].find(dim)

    def all(self) -> list[Class]:
        """Every class once, in the order of the graph."""
        return list(dict.fromkeys(c for v in self._values for _, c in self.classes(v)))

    def meeting(self, family: Class) -> set[Class]:
        """The families that share a value with `family`, itself included."""
        found: set[Class] = set()
        for value in self._values:
            here = {f for _, f in self.families(value)}
            if family in here:
                found |= here
        return found

    def family(self, dim: Dim) -> Class:
        """The family of a dim, or of a class."""
        return self._sets[1].find(dim)

    def classes(self, value: Value) -> tuple[tuple[int, Class], ...]:
        """(dim, class) of every dim of a value."""
        return self._of_dims(value, 0)

    def families(self, value: Value) -> tuple[tuple[int, Class], ...]:
        """(dim, family) of every dim of a value."""
        return self._of_dims(value, 1)

    def _of_dims(self, value: Value, which: int) -> tuple[tuple[int, Class], ...]:
        """(dim, name of its set) of every dim, each asked once."""
        key = (value, which)
        if key not in self._known:
            find = self._sets[which].find
            self._known[key] = tuple((d, find((value, d))) for d in range(value.type.rank))
        return self._known[key]


def _products(op: Op) -> Iterator[tuple[Dim, tuple[Dim, ...]]]:
    """(dim, dims it is the product of) of a reshape, in either direction, without sizes of 1."""
    if not isinstance(op.attrs, ReshapeAttrs):
        return
    x, y = op.operands[0], op.result
    for left, right in _blocks(x.type.shape, y.type.shape):
        if len(left) == 1 and len(right) > 1:
            yield (x, left[0]), tuple((y, d) for d in right)
        elif len(right) == 1 and len(left) > 1:
            yield (y, right[0]), tuple((x, d) for d in left)


def _blocks(left: tuple[int, ...], right: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of dims, from the front, with equal products, without sizes of 1."""
    common = {*accumulate(left, mul)} & {*accumulate(right, mul)}

    def runs(shape: tuple[int, ...]) -> Iterator[list[int]]:
        run = []
        for dim, end in enumerate(accumulate(shape, mul)):
            run += [dim] if shape[dim] != 1 else []
            if run and end in common:
                yield run
                run = []

    return zip(runs(left), runs(right), strict=False)
