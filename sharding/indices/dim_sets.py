"""Sets of dims that the ops of a graph walk together, for graphs of any number of layers.

Dims are numbered, ops that look alike share one form (`dims.form_of`), and the sets are the
connected components of pairs of such a walk and a dim, in arrays: Python visits every op once,
however many kinds of sets are asked for. What the sets mean is in `indices.py` and in
`shard_classes`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.indices.dims import Dim, Form, factors, form_of, repeated_dims

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_NO_NUMBERS: Numbers = np.zeros(0, np.int64)


class DimTable:
    """The dims of every value of a graph, regions included, as numbers in program order.

    `own` holds for the dims that walk along an index of the model.
    """

    def __init__(self, graph: Graph) -> None:
        self._first: dict[Value, int] = {}
        self._dims: list[Dim] = []
        self._rows: dict[Form, list[list[int]]] = {}
        for value in graph.inputs:
            self._number(value)
        for op in graph.walk():
            self._enter(op)
        self.own: Mask = np.ones(len(self._dims), bool)
        self.own[[self.number(dim) for dim in repeated_dims(graph)]] = False
        self._walks: dict[bool, tuple[Numbers, Numbers]] = {}  # by `same_size`

    def _number(self, value: Value) -> int:
        """The number of the first dim of a value."""
        first = self._first.get(value)
        if first is None:
            first = self._first[value] = len(self._dims)
            self._dims += [(value, d) for d in range(value.type.rank)]
        return first

    def _enter(self, op: Op) -> None:
        """Number the values of `op` and note its form."""
        for region in op.regions:
            for value in region.inputs:
                self._number(value)
        row = [self._number(v) for v in (*op.operands, *op.results)]
        if not op.regions:
            self._rows.setdefault(form_of(op), []).append(row)
            return
        for factor in factors(op):  # a carry is a form of its own
            slots = tuple((i, d, v.type.shape[d]) for i, (v, d) in enumerate(factor))
            self._rows[Form((slots,))] = [[self._number(v) for v, _ in factor]]

    def number(self, dim: Dim) -> int:
        """The number of a dim; -1 for a dim that no op of the graph reads or makes."""
        first = self._first.get(dim[0])
        return -1 if first is None else first + dim[1]

    def dim(self, number: int) -> Dim:
        """The dim with a number."""
        return self._dims[number]

    def of(self, values: Container[Value]) -> Mask:
        """Which dims are those of `values`."""
        return np.array([v in values for v, _ in self._dims], bool)

    def sets(
        self, kept: Mask, *, same_size: bool = False, tied: Iterable[tuple[Dim, Dim]] = ()
    ) -> DimSets:
        """Sets of those dims of `kept` that some op walks together, if they are of equal size when
        `same_size`; and of the pairs of `tied`.
        """
        given = [(self.number(a), self.number(b)) for a, b in tied]
        if same_size not in self._walks:
            self._walks[same_size] = self._walked(same_size)
        walks, dims = self._walks[same_size]
        held = kept[dims]
        pairs = np.stack((walks[held], dims[held]), 1)
        count = int(walks[-1]) + 1 if len(walks) else len(self._dims)
        joined = np.concatenate((np.array(given, np.int64).reshape(-1, 2), pairs))
        return DimSets(self, _components(count, joined))

    def _walked(self, same_size: bool) -> tuple[Numbers, Numbers]:
        """Which op's factor walks along which dim: numbers of the factors, which go on behind those
        of the dims, and of the dims."""
        first, walks, dims = len(self._dims), [_NO_NUMBERS], [_NO_NUMBERS]
        for form, rows in self._rows.items():
            firsts = np.array(rows, np.int64)
            for factor in form.factors:
                for group in _by_size(factor) if same_size else [factor]:
                    slots = [slot for slot, _, _ in group]
                    columns = firsts[:, slots] + np.array([d for _, d, _ in group], np.int64)
                    walks.append(np.repeat(np.arange(first, first + len(rows)), len(group)))
                    dims.append(columns.ravel())
                    first += len(rows)
        return np.concatenate(walks), np.concatenate(dims)


def _by_size(factor: tuple[tuple[int, int, int], ...]) -> list[list[tuple[int, int, int]]]:
    """The parts of a factor whose dims have equal sizes."""
    sizes = dict.fromkeys(size for _, _, size in factor)
    return [[entry for entry in factor if entry[2] == size] for size in sizes]


def _components(count: int, pairs: Numbers) -> Numbers:
    """The smallest number connected with each of `count` numbers: roots of neighbouring sets are
    hooked to the smaller one until none differ.
    """
    root: Numbers = np.arange(count)
    while len(pairs):
        ends = root[pairs]
        apart = ends[:, 0] != ends[:, 1]
        pairs, ends = pairs[apart], ends[apart]
        np.minimum.at(root, ends.max(1), ends.min(1))
        while (root != (shorter := root[root])).any():
            root = shorter
    return root


@dataclass(slots=True)
class DimSets:
    """Disjoint sets of dims; a set is named by its first dim in program order."""

    table: DimTable
    _root: Numbers = field(repr=False)

    def find(self, dim: Dim) -> Dim:
        """The dim that names the set of `dim`."""
        number = self.table.number(dim)
        return dim if number < 0 else self.table.dim(int(self._root[number]))


def shard_classes(
    table: DimTable, batch: Mapping[Value, int], kept: Iterable[tuple[Value, Value]] = ()
) -> DimSets:
    """Sets of dims of batch-free values that must be sharded alike: a weight, its optimizer leaves,
    its gradient.

    Values with a batch label stay out, which keeps activations from tying weights together.
    `kept` pairs state with what becomes of it: a weight that is only rounded from an optimizer leaf
    meets its gradient there.
    """
    same = (((a, d), (b, d)) for a, b in kept for d in range(a.type.rank))
    return table.sets(table.own & ~table.of(batch), tied=same)
