"""Segment offsets of sorted rows, read as comparisons of their keys.

How many rows have which key is a histogram of the keys; sums of it say where segments begin and
end: row p of the sorted list is in front of "as many rows as have keys below k" exactly when its
own key is below k. Everything linear in the histogram is followed with one unit histogram per key,
so that sums need not be recognised by their spelling. What is followed never counts further than
the number of rows, in a type that holds it: unit histograms do not show what wraps or rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.compiler.dtypes import DType, cast
from shardwright.compiler.ir.facts import behind, combination, dim_map, is_linear, keeps_order
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import ScatterAttrs
from shardwright.compiler.ir.traits import IDENTITIES, REDUCTIONS, VIEWS
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.intervals import limits
from shardwright.sharding.indices.repeats import MOST, elements, varies
from shardwright.sharding.prepare.sorted_rows.level import Level

MOST_KEYS = 1 << 12  # different keys that are told apart (our choice)
_SMALL = 1 << 20  # elements of a value times keys, up to which it is followed


class Thresholds:
    """The offsets of segments of one sort, found when first asked for."""

    def __init__(self, level: Level, sort: Op) -> None:
        self.level = level
        number = sort.attrs.keys[0][0]
        key = sort.operands[number]
        low, high = level.ranges.get(key, (-1, -1))
        bounded = low >= 0 and high < min(MOST_KEYS, limits(key.type.dtype)[1])
        self.num_keys = high + 1 if bounded else 0
        self.rows: int = key.type.num_elements
        self.root = behind(key, level.made, keeps_order)  # the keys before they were made a list
        self._counts: dict[Value, np.ndarray] | None = None
        self._exact: dict[DType, bool] = {}

    def of(self, value: Value) -> np.ndarray | None:
        """The keys k of a value that counts, in every element, the rows with keys below k."""
        if not 0 < self.num_keys <= self.rows <= MOST:
            return None
        if self._counts is None:
            self._counts = self._found()
        counts = self._counts.get(value)
        if counts is None:
            return None
        steps = counts[:-1] - counts[1:]
        below = bool(np.all((counts == 0) | (counts == 1)) and np.all(steps >= 0))
        return np.asarray(counts.sum(axis=0)) if below else None

    def _found(self) -> dict[Value, np.ndarray]:
        """Every value that is linear in the histogram: what it is per unit histogram [keys, ...].

        `keyed` holds what is a function of the key of a row, with rows in the leading dims: its
        value for rows whose keys are 0, 1, ... over and over.
        """
        sample = (np.arange(self.rows) % self.num_keys).astype(self.root.type.dtype.numpy)
        keyed = {self.root: sample.reshape(self.root.type.shape)}
        counts: dict[Value, np.ndarray] = {}
        for op in self.level.graph.ops:
            if op.name in IDENTITIES:
                for known in (keyed, counts):
                    pairs = zip(op.operands, op.results, strict=True)
                    known.update({r: known[v] for v, r in pairs if v in known})
            elif any(v in counts for v in op.operands):
                self._sum(op, counts)
            elif any(v in keyed for v in op.operands):
                self._read(op, keyed, counts)
        return counts

    def _read(
        self, op: Op, keyed: dict[Value, np.ndarray], counts: dict[Value, np.ndarray]
    ) -> None:
        """A function of keys, or a histogram."""
        if (found := self._scattered(op, keyed)) is not None:
            self._take(op, found, counts)
        elif op.name in REDUCTIONS and self._leads(op.operands[0], len(op.attrs.dims)):
            if op.attrs.kind == "add" and op.attrs.dims == tuple(range(len(op.attrs.dims))):
                per_row = keyed[op.operands[0]].reshape(self.rows, *op.result.type.shape)
                self._take(op, per_row[: self.num_keys], counts)
        elif op.name in VIEWS or OPS[op.name].elementwise:
            given = [keyed[v] if v in keyed else self._alike(v) for v in op.operands]
            if self._keeps(op) and op.result.type.num_elements <= MOST:
                arrays = [array for array in given if array is not None]
                if len(arrays) == len(given):
                    keyed[op.result] = OPS[op.name].reference(op, arrays)[0]

    def _scattered(self, op: Op, keyed: dict[Value, np.ndarray]) -> np.ndarray | None:
        """The histogram that ones added up at keys make."""
        if not isinstance(op.attrs, ScatterAttrs):
            return None
        target, places, update = op.operands
        start, one = elements(self.level.made, target), elements(self.level.made, update)
        plain = op.attrs.kind == "add" and target.type.rank == 1 == places.type.shape[-1]
        plain &= op.attrs.index_vector_dim == places.type.rank - 1
        if not plain or places not in keyed or start is None or one is None:
            return None
        if start.any() or varies(one.ravel(), 0) or not self._leads(places, places.type.rank - 1):
            return None
        hits = keyed[places].reshape(self.rows)[: self.num_keys, None]
        return np.asarray((hits == np.arange(target.type.shape[0])) * one.flat[0])

    def _leads(self, value: Value, dims: int) -> bool:
        """True when the first dims of a value are the rows."""
        rows: int = math.prod(value.type.shape[:dims])
        return rows == self.rows

    def _keeps(self, op: Op) -> bool:
        """True when rows stay in the leading dims."""
        shape = op.result.type.shape
        if (walked := dim_map(op)) is not None:
            rank = op.operands[0].type.rank
            return walked[:rank] == tuple(range(rank))
        return self.rows in (math.prod(shape[:d]) for d in range(len(shape) + 1))

    def _alike(self, value: Value) -> np.ndarray | None:
        """Constants that are the same for all rows."""
        array = elements(self.level.made, value)
        if array is None or not array.ndim:
            return array
        if array.size % self.rows:
            return None
        per_row = array.reshape(self.rows, -1)
        return array if not varies(per_row, 0) else None

    def _sum(self, op: Op, counts: dict[Value, np.ndarray]) -> None:
        """An op that is linear in the histogram, once per unit histogram."""
        size = sum(v.type.num_elements for v in op.results) * self.num_keys
        if not is_linear(op) or size > _SMALL:
            return
        rest = [elements(self.level.made, v) for v in op.operands if v not in counts]
        if any(array is None or array.any() for array in rest):
            return
        if combination(op):  # with signs that cancel, a part of a sum is more than all of it
            sizes = {v: np.abs(counts[v]) for v in op.operands if v in counts}
            if (self._units(op, sizes) > 1).any():
                return
        self._take(op, self._units(op, counts), counts)

    def _take(self, op: Op, units: np.ndarray, counts: dict[Value, np.ndarray]) -> None:
        """Follow a result, when it is exact for any histogram of the rows."""
        dtype = op.result.type.dtype
        if dtype not in self._exact:
            whole = np.arange(self.rows + 1)
            with np.errstate(over="ignore"):
                self._exact[dtype] = np.array_equal(cast(whole, dtype), whole)
        if self._exact[dtype] and np.isin(units, (-1, 0, 1)).all():
            counts[op.result] = units

    def _units(self, op: Op, counts: Mapping[Value, np.ndarray]) -> np.ndarray:
        return np.stack([self._unit(op, counts, k) for k in range(self.num_keys)])

    def _unit(self, op: Op, counts: Mapping[Value, np.ndarray], key: int) -> np.ndarray:
        given: Sequence[np.ndarray] = [
            counts[v][key].astype(v.type.dtype.numpy)
            if v in counts
            else np.zeros(v.type.shape, v.type.dtype.numpy)
            for v in op.operands
        ]
        return OPS[op.name].reference(op, given)[0]
