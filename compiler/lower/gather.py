"""`gather` and `scatter`: windows of a tensor whose starts are data.

All index entries become one row number: the entries, clamped (gather) or tested (scatter) against
their dim, times the distance their dim moves the address. Positions that could make windows of a
scatter overlap are part of the number too, so that two numbers are equal or disjoint. An index
along a dim whose other dims are all matched one to one is rewritten earlier into a comparison with
a count (`canonical.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops.gather import last_starts, watched, window_sizes, windows_of
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.kernel import View
from shardwright.compiler.lower.indexing_map import (
    IndexExpr,
    IndexingMap,
    all_leaves,
    extent,
    fresh,
    leaves,
    unify,
)
from shardwright.compiler.lower.registry import Lowering, register, register_maker
from shardwright.compiler.lower.remat_in_kernel import count
from shardwright.compiler.lower.storage import Place
from shardwright.compiler.lower.task import ALONE, NeedsCopyError, Task
from shardwright.compiler.lower.views import Layout

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body
    from shardwright.compiler.lower.emit import Emitter
    from shardwright.compiler.lower.space import Space


def _make_gather(body: Body, op: Op) -> None:
    body.add_task(op, ALONE, tuple(body.stored(v, op) for v in op.operands))


def _make_scatter(body: Body, op: Op) -> None:
    target, *rest = op.operands
    memory = body.owned(op, target)
    body.add_task(op, ALONE, tuple(body.stored(v, op) for v in rest), memory)


def _batch_exprs(indexing: IndexingMap, vector_dim: int) -> list[IndexExpr]:
    """Expressions of the index dims without the index vector."""
    return [expr for d, expr in enumerate(indexing) if d != vector_dim]


def _walk_index(space: Space, task: Task, moving: IndexingMap, index: IndexingMap) -> None:
    """The dims of the moving tensor that are not windows walk the index tensor."""
    windows = windows_of(task.op.attrs)
    others = [expr for d, expr in enumerate(moving) if d not in windows.moving_dims]
    for expr, wanted in zip(others, _batch_exprs(index, windows.vector_dim), strict=True):
        if not unify(expr, wanted):
            space.refuse("windows and index tensor walk different indices")


def _gather_indexing(space: Space, task: Task) -> IndexingMap:
    operand, index = space.operand(task, 0), space.operand(task, 1)
    result = list(fresh(task.result.type.shape))
    for d, dim in windows_of(task.op.attrs).walked(len(operand)).items():
        if task.op.attrs.slice_sizes[d] == task.data[0].type.shape[d]:
            result[dim] = operand[d]
    _walk_index(space, task, tuple(result), index)
    if watched(task.op) is not None:
        _walk_index(space, task, tuple(result), space.operand(task, 2))
    return tuple(result)


def _scatter_indexing(space: Space, task: Task) -> IndexingMap:
    update = space.operand(task, 1)
    _walk_index(space, task, update, space.operand(task, 0))
    if watched(task.op) is not None:
        _walk_index(space, task, update, space.operand(task, 2))
    return update


def _emit_gather(emitter: Emitter, task: Task) -> int:
    result, operand = emitter.space.results[task.result], task.data[0]
    address = _Address(emitter, task, operand, index=1)
    indexing: list[IndexExpr] = [()] * operand.type.rank
    for d, dim in address.windows.walked(operand.type.rank).items():
        indexing[d] = result[dim]
    view = address.view(indexing)
    emitter.note_indexed_load(view.tensor)
    steps = address.steps({})
    row = address.row(steps, {}, clamped=True)
    attrs = {"view": view, "stride": steps.unit, "rows": steps.rows, "mode": "clamp"}
    inputs = (row, *(address.inside_whole() or address.inside()))
    attrs |= _counted(task.op)
    return emitter.node("load_indexed", inputs, all_leaves(result), task.result.type.dtype, attrs)


def _emit_scatter(emitter: Emitter, task: Task) -> int:
    update, shape = emitter.space.operand(task, 1), task.result.type.shape
    address = _Address(emitter, task, task.result, index=0)
    windows = address.windows
    indexing: list[IndexExpr] = [()] * len(shape)
    folded: dict[int, IndexExpr] = {}
    for d, dim in windows.walked(len(shape)).items():
        moves = d in windows.index_map and address.sizes[d] < shape[d]
        (folded if moves else indexing)[d] = update[dim]
    view = address.view(indexing)
    steps = address.steps(folded)
    row = address.row(steps, folded, clamped=False)
    ordered = (*_batch_exprs(address.indexing, windows.vector_dim), *folded.values())
    attrs = {
        "view": view,
        "stride": steps.unit,
        "rows": steps.rows,
        "kind": task.op.attrs.kind,
        "unique": task.op.attrs.unique,
        "order": tuple(n for a in all_leaves(ordered) for n in emitter.numbers((a,))),
        **_counted(task.op),
    }
    source = emitter.operand(task, 1)
    span = all_leaves(update)
    inputs = (source, row, *address.inside_whole())
    emitter.node("store_indexed", inputs, span, task.result.type.dtype, attrs)
    emitter.note_store(task, view)
    return -1


def _counted(op: Op) -> dict[str, Any]:
    """The attribute of an access whose indices other ranks have too."""
    return {"replicated": op.attrs.replicated} if op.attrs.replicated else {}


@dataclass(frozen=True, slots=True)
class _Steps:
    """Row numbers count `unit` elements; `of` is the rows one position of a dim moves."""

    unit: int
    rows: int
    of: dict[int, int]


class _Address:
    """Kernel nodes that turn the index tensor, operand `index` of a task, into row numbers of
    `value`.
    """

    def __init__(self, emitter: Emitter, task: Task, value: Value, index: int) -> None:
        self.emitter, self.value, self.index = emitter, value, task.data[index]
        self.indexing = emitter.space.operand(task, index)
        self.task = task
        self.windows, self.sizes = windows_of(task.op.attrs), window_sizes(task.op)
        self.last = dict(zip(self.windows.index_map, last_starts(task.op), strict=True))
        self.batching = dict(
            zip(self.windows.operand_batching, self.windows.indices_batching, strict=True)
        )
        self.shape = value.type.shape
        self.place = emitter.storage.place(value)
        self._tests: list[int] = []

    def view(self, indexing: list[IndexExpr]) -> View:
        """Row 0: dims without index stand still, windows start at position 0."""
        dims = list(self.place.layout.dims)
        for d, expr in enumerate(indexing):
            size = extent(leaves(expr))
            if size == 1:
                dims[d] = ()
            elif size != self.shape[d]:
                dims[d] = ((size, self._stride(d)),)
        layout = Layout(self.place.layout.offset, tuple(dims))
        return self.emitter.view(Place(self.place.tensor, layout), tuple(indexing), self.value)

    def _stride(self, d: int) -> int:
        """Elements from one position of a dim to the next."""
        pieces = self.place.layout.dims[d]
        if len(pieces) > 1:
            raise self.emitter.storage.dense_copy_of(self.value)
        return pieces[0][1] if pieces else 0

    def steps(self, folded: dict[int, IndexExpr]) -> _Steps:
        """How far each indexed or batch dim moves, in rows; windows in `folded` move rows too."""
        addressed = self._addressed()
        room = {d: self.shape[d] - (1 if d in folded else self.sizes[d]) for d in addressed}
        strides = {d: self._stride(d) for d, n in room.items() if n}
        if any(stride < 0 for stride in strides.values()):  # rows count upwards
            raise self.emitter.storage.dense_copy_of(self.value)
        unit = math.gcd(*strides.values()) or 1
        of = {d: stride // unit for d, stride in strides.items()}
        return _Steps(unit, 1 + sum(n * of[d] for d, n in room.items() if n), of)

    def _addressed(self) -> list[int]:
        return [*self.windows.index_map, *self.batching]

    def row(self, steps: _Steps, folded: dict[int, IndexExpr], clamped: bool) -> int:
        """The row number per window; unless `clamped`, -1 for a window that leaves the tensor."""
        index = self.index.type.dtype
        if len(steps.of) == len(self._addressed()) == 1 and index is DType.I32 and not folded:
            (d,) = self.windows.index_map
            if self.last[d] == steps.rows - 1:
                entry = self._entry(0)  # one dim: the range check of the transfer is the test
                self._test(entry, self._clamp(entry, d))
                return entry
        terms = [self._term(k, d, steps.of.get(d, 0)) for k, d in enumerate(self.windows.index_map)]
        for d, i in self.batching.items():
            terms.append(count(self.emitter, self.indexing[i], DType.I32, step=steps.of.get(d, 0)))
        terms += [count(self.emitter, n, DType.I32, step=steps.of[d]) for d, n in folded.items()]
        total = (
            self._joined("add", terms, DType.I32) if terms else self.emitter.constant(0, DType.I32)
        )
        tests = self.inside()
        if clamped or not tests:
            return total
        nowhere = self.emitter.constant(-1, DType.I32)
        return self.emitter.pointwise("select", (*tests, total, nowhere), DType.I32)

    def inside(self) -> tuple[int, ...]:
        """The node that tells which windows lie inside the tensor, if any may not."""
        return (self._joined("and", self._tests, DType.PRED),) if self._tests else ()

    def inside_whole(self) -> tuple[int, ...]:
        """The node that tells which windows lie inside the whole operand, where this rank has a
        part of it.
        """
        given = watched(self.task.op)
        if given is None:
            return ()
        at = len(self.task.data) - 1
        value, indexing = self.task.data[at], self.emitter.space.operand(self.task, at)
        tests = []
        for k, last in enumerate(self.task.op.attrs.last_starts):
            entry = self._element(value, indexing, k)
            tests.append(self._unmoved(entry, self._between(entry, last, value.type.dtype)))
        return (self._joined("and", tests, DType.PRED),)

    def _term(self, k: int, d: int, step: int) -> int:
        """Rows that entry `k` of the index moves; it is clamped to its dim on the way."""
        entry = self._entry(k)
        clamped = self._clamp(entry, d)
        self._test(entry, clamped)
        position = clamped
        if self.index.type.dtype is not DType.I32:
            position = self.emitter.pointwise("convert", (clamped,), DType.I32)
        return self.emitter.pointwise(
            "multiply", (position, self.emitter.constant(step, DType.I32)), DType.I32
        )

    def _entry(self, k: int) -> int:
        """Entry `k` of every index vector."""
        return self._element(self.index, self.indexing, k)

    def _element(self, value: Value, indexing: IndexingMap, k: int) -> int:
        """Entry `k` of the vectors of an index tensor."""
        place = self.emitter.storage.place(value)
        d = self.windows.vector_dim
        if d < len(indexing):
            pieces = place.layout.dims[d]
            if len(pieces) > 1:
                raise NeedsCopyError(value)
            offset = place.layout.offset + k * (pieces[0][1] if pieces else 0)
            dims = tuple(() if i == d else p for i, p in enumerate(place.layout.dims))
            place = Place(place.tensor, Layout(offset, dims))
            indexing = tuple(() if i == d else expr for i, expr in enumerate(indexing))
        if any(stride == 0 for pieces in place.layout.dims for _, stride in pieces):
            raise NeedsCopyError(value)  # row numbers exist once per window
        return self.emitter.load(value, indexing, place=place)

    def _clamp(self, entry: int, d: int) -> int:
        """An entry inside the positions where a window of dim `d` may start."""
        return self._between(entry, self.last[d], self.index.type.dtype)

    def _between(self, entry: int, last: int, dtype: DType) -> int:
        """An entry clamped to 0 .. `last`."""
        last = min(last, int(np.iinfo(dtype.numpy).max))
        low, high = self.emitter.constant(0, dtype), self.emitter.constant(last, dtype)
        return self.emitter.pointwise("clamp", (low, entry, high), dtype)

    def _test(self, entry: int, clamped: int) -> None:
        """Remember that windows whose entry was moved by clamping lie outside."""
        self._tests.append(self._unmoved(entry, clamped))

    def _unmoved(self, entry: int, clamped: int) -> int:
        """Where clamping an entry did not move it."""
        attrs = {"direction": "EQ"}
        return self.emitter.pointwise("compare", (entry, clamped), DType.PRED, attrs)

    def _joined(self, op: str, terms: Sequence[int], dtype: DType) -> int:
        return reduce(lambda total, term: self.emitter.pointwise(op, (total, term), dtype), terms)


register_maker("gather", _make_gather)
register_maker("scatter", _make_scatter)
register("gather", Lowering(_gather_indexing, _emit_gather))
register("scatter", Lowering(_scatter_indexing, _emit_scatter))
