"""Proof that a step does not depend on the order that a sort brings the rows of all samples into.

Whatever a sort of M rows made is followed through its level. A value is *rows* along a dim when
another order would only reorder it along that dim, and *by token* when it says where every row of
the unsorted list went. The proof holds when neither leaves the level: rows are put back where they
came from, or added up. Masks of sorted segments are rows too (`counts.py`). `blocks.py` then
chooses another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.ir.facts import combination, counted_dim, dim_map, lookup
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import CompareAttrs, SortAttrs
from shardwright.compiler.ir.traits import IDENTITIES, REDUCTIONS, UPDATES, VIEWS, WRITES
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.indices.dims import Factor, factors
from shardwright.sharding.indices.repeats import elements, varies
from shardwright.sharding.prepare.sorted_rows.counts import Thresholds
from shardwright.sharding.prepare.sorted_rows.level import Level, is_count, masks_behind

POSITION_FIRST = ("LT", "GE")
POSITION_LAST = ("GT", "LE")


class OrderMattersError(Exception):
    """A value depends on the order of the rows; `loc` is where."""

    def __init__(self, reason: str, loc: Loc) -> None:
        super().__init__(reason)
        self.reason = reason
        self.loc = loc


@dataclass(frozen=True, slots=True)
class Mark:
    """`dim` holds rows in the order of the sort; or, `by_token`, elements are places in it."""

    dim: int
    by_token: bool = False


@dataclass(frozen=True, slots=True)
class Mask:
    """A comparison of places along `dim` with offsets of segments, which is one of keys: operand
    `offsets` of it becomes the constant `keys` at `dims` of the result.
    """

    dim: int
    offsets: int
    dims: tuple[int, ...]
    keys: np.ndarray


@dataclass(slots=True)
class Shuffle:
    """What is known of one sort. `tables` holds integers that are a function of a row's place in
    the unsorted list, as they would be without sorting; `inverses` are sorts of the order itself.
    """

    sort: Op
    level: Level
    thresholds: Thresholds
    marks: dict[Value, Mark] = field(default_factory=dict)
    tables: dict[Value, np.ndarray] = field(default_factory=dict)
    masks: dict[Op, Mask] = field(default_factory=dict)
    inverses: list[Op] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many rows are sorted."""
        return self.sort.results[0].type.shape[0]

    def prove(self) -> None:
        """Follow the rows to the end of the level. Raises OrderMattersError."""
        for op in self.level.graph.ops:
            self._step(op)
        for value in self.level.graph.outputs:
            if value in self.marks:
                raise OrderMattersError("sorted rows leave the loop or the step", self.sort.loc)

    def _step(self, op: Op) -> None:
        mask = self._mask(op)
        if op is self.sort:
            self._begin()
        elif mask is not None:
            self.masks[op] = mask
            self.marks[op.result] = Mark(mask.dim)
        elif self.marks.keys().isdisjoint(op.operands):
            return
        elif op.name in IDENTITIES:
            self._pass_on(op)
        elif self._is_inverse(op):
            self._invert(op)
        else:
            self._follow(op)

    def _begin(self) -> None:
        """Everything that is sorted becomes rows; a count that is sorted becomes the order."""
        for operand, result in zip(self.sort.operands, self.sort.results, strict=True):
            self.marks[result] = Mark(0)
            if is_count(self.level, operand, 0):
                self.tables[result] = np.arange(self.rows, dtype=result.type.dtype.numpy)

    def _pass_on(self, op: Op) -> None:
        pairs = list(zip(op.operands, op.results, strict=True))
        self.marks.update({result: self.marks[v] for v, result in pairs if v in self.marks})
        self.tables.update({result: self.tables[v] for v, result in pairs if v in self.tables})

    def _is_inverse(self, op: Op) -> bool:
        """True for a sort by the order itself: it brings rows back."""
        if not is_row_sort(op):
            return False
        number = op.attrs.keys[0][0]
        return self._is_order(op.operands[number], by_token=False)

    def _is_order(self, value: Value, *, by_token: bool) -> bool:
        """True for the order of the rows, or with `by_token` for its inverse, in any shape."""
        mark, table = self.marks.get(value), self.tables.get(value)
        if mark is None or table is None or mark.by_token != by_token:
            return False
        return np.array_equal(np.ravel(table), np.arange(self.rows))

    def _invert(self, op: Op) -> None:
        """Rows are back in the order of tokens, and a count says where they were."""
        for operand, result in zip(op.operands, op.results, strict=True):
            if is_count(self.level, operand, 0):
                self.marks[result] = Mark(0, by_token=True)
                self.tables[result] = np.arange(self.rows, dtype=result.type.dtype.numpy)
            elif operand not in self.marks or self.marks[operand].by_token:
                raise self._refused(op)
        self.inverses.append(op)

    def _follow(self, op: Op) -> None:
        """Marks of the results of an op that reads marked values."""
        if any(self.marks[v].by_token for v in op.operands if v in self.marks):
            self._follow_places(op)
        else:
            self._follow_rows(op)

    def _follow_rows(self, op: Op) -> None:
        """Rows stay rows, side by side; folded over, the order of their terms is all that is lost.

        What meets them must be rows as well, or the same for all of them.
        """
        left = {v for v in op.operands if v in self.marks}
        found: dict[Value, int] = {}
        for factor in factors(op) if self._is_followed(op) else ():
            if any(self._is_marked(v, d) for v, d in factor if v in op.operands):
                self._check(op, factor)
                left -= {v for v, _ in factor}
                for value, dim in factor:
                    if value in op.results and found.setdefault(value, dim) != dim:
                        raise self._refused(op)
        folded = op.name in REDUCTIONS and self.marks[op.operands[0]].dim in op.attrs.dims
        if left and not folded:
            raise self._refused(op)
        self.marks.update({v: Mark(d) for v, d in found.items()})
        if len(found) == len(op.results) == 1:
            self._tabulate(op)

    def _is_followed(self, op: Op) -> bool:
        """False for loops, and for what writes into rows: at a place, not at a row."""
        writes = op.name in WRITES and op.operands[0] in self.marks
        return not (op.regions or writes or op.name in UPDATES)

    def _is_marked(self, value: Value, dim: int) -> bool:
        return value in self.marks and self.marks[value].dim == dim

    def _repeats(self, value: Value, dim: int) -> bool:
        """True for what is the same for all rows; tables of other values than rows and places are
        constants.
        """
        constant = value in self.tables and value not in self.marks
        return constant or self.level.repeats(value, dim)

    def _check(self, op: Op, factor: Factor) -> None:
        """Refuse a dim that rows share with something else."""
        given = [(v, d) for v, d in factor if v in op.operands]
        alike = all(self._is_marked(v, d) or self._repeats(v, d) for v, d in given)
        whole = all(v.type.shape[d] == self.rows for v, d in factor)
        clash = any(v in self.marks and not self._is_marked(v, d) for v, d in given)
        if not alike or not whole or clash:
            raise self._refused(op)
        if combination(op) == "replace":  # the last of several updates stays
            raise self._refused(op)

    def _follow_places(self, op: Op) -> None:
        """Places are calculated with, looked up at, or written to."""
        rows = lookup(op)
        if rows is not None and rows.index_map == rows.dropped_dims and len(rows.index_map) == 1:
            (dim,) = rows.index_map
            if op.name in WRITES and self._writes_all(op, dim):
                self.marks[op.result] = Mark(dim)
                return
            if op.name not in WRITES and self._takes_all(op, dim):
                return
        if not self._is_of_one_place(op) or not self._tabulate(op):
            raise self._refused(op)
        if varies(self.tables[op.result].ravel(), 0):
            self.marks[op.result] = Mark(0, by_token=True)

    def _is_of_one_place(self, op: Op) -> bool:
        """True when every element of the result is the same function of the place of its row.

        A table is made as if nothing were sorted. What else varies by token (a count, the order)
        would hold in it by chance: place and token are then the same number.
        """
        dims = [d for d in dim_map(op) or () if d is not None]
        in_order = dims == sorted(dims)  # or elements are those of other rows
        whole = op.result.type.num_elements == self.rows
        return whole and in_order and all(map(self._is_place_or_uniform, op.operands))

    def _is_place_or_uniform(self, value: Value) -> bool:
        if value in self.marks:
            return self.marks[value].by_token
        known = self.tables[value] if value in self.tables else elements(self.level.made, value)
        return known is not None and not varies(known.ravel(), 0)

    def _takes_all(self, op: Op, dim: int) -> bool:
        """True for a gather along `dim` that looks every row up at its place."""
        rows, places = op.operands
        return self.marks.get(rows) == Mark(dim) and self._is_order(places, by_token=True)

    def _writes_all(self, op: Op, dim: int) -> bool:
        """True for a scatter along `dim` that writes every row to its place among equal ones."""
        target, places, update = op.operands
        return (
            target.type.shape[dim] == self.rows
            and self.level.repeats(target, dim)
            and self.marks.keys().isdisjoint((target, update))
            and self._is_order(places, by_token=True)
        )

    def _tabulate(self, op: Op) -> bool:
        """Remember what the result is without sorting, where it follows from places alone."""
        given = [
            self.tables.get(v)
            if v in self.marks or v in self.tables
            else elements(self.level.made, v)
            for v in op.operands
        ]
        arrays = [array for array in given if array is not None]
        if len(arrays) < len(given) or not (op.name in VIEWS or OPS[op.name].elementwise):
            return False
        self.tables[op.result] = OPS[op.name].reference(op, arrays)[0]
        return True

    def _mask(self, op: Op) -> Mask | None:
        """How a comparison of places with the offsets of segments reads as one of keys."""
        if not isinstance(op.attrs, CompareAttrs):
            return None
        for offsets, directions in ((1, POSITION_FIRST), (0, POSITION_LAST)):
            place, dims = self.level.peeled(op.operands[1 - offsets])
            counted = counted_dim(self.level.made.get(place))
            if op.attrs.direction not in directions or counted is None:
                continue
            dim = dims[counted]
            source, where = self.level.peeled(op.operands[offsets])
            keys = self.thresholds.of(source)
            if keys is not None and dim not in where and op.result.type.shape[dim] == self.rows:
                return Mask(dim, offsets, where, keys)
        return None

    def _refused(self, op: Op) -> OrderMattersError:
        shown = ", ".join(str(v.type) for v in op.operands if v in self.marks)
        return OrderMattersError(f"{op.name} of {shown} depends on the order of the rows", op.loc)


def is_row_sort(op: Op) -> bool:
    """True for the sort of one list by one integer key, from the least on."""
    if (
        not isinstance(op.attrs, SortAttrs)
        or op.operands[0].type.rank != 1
        or len(op.attrs.keys) != 1
    ):
        return False
    number, direction, _ = op.attrs.keys[0]
    return direction == "LT" and op.operands[number].type.dtype.is_integer


def proven(sorts: Sequence[Op], level: Level) -> tuple[list[Shuffle], list[OrderMattersError]]:
    """The sorts whose order does not matter, and why that of the others may."""
    found: list[Shuffle] = []
    refused = []
    for sort in sorts:
        if any(sort in shuffle.inverses for shuffle in found):
            continue
        shuffle = Shuffle(sort, level, Thresholds(level, sort))
        try:
            shuffle.prove()
            _check_order(level, [*found, shuffle])
        except OrderMattersError as error:
            refused.append(error)
        else:
            found.append(shuffle)
    return found, refused


def _check_order(level: Level, shuffles: Sequence[Shuffle]) -> None:
    """Refuse the last of `shuffles` when masks, which read what sorts make, would be needed before
    it.
    """
    sort_of = {mask: shuffle.sort for shuffle in shuffles for mask in shuffle.masks}
    if sort_of and len(masks_behind(level.graph, sort_of)) < len(level.graph.ops):
        raise OrderMattersError(
            "what is sorted needs a mask of its segments", shuffles[-1].sort.loc
        )
