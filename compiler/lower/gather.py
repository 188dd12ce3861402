"""`gather` and `scatter` of rows: one dim of the operand is picked by an index, the others are
walked.

Embedding lookups load rows by index, their gradients add rows by index. An index along a dim whose
other dims are all matched one to one is rewritten earlier into a comparison with a count
(`canonical.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.ir.types import Op, Value
from compiler.isa.region import View
from compiler.lower.labels import Label, Labels, all_leaves, fresh, leaves, unify
from compiler.lower.registry import Lowering, register
from compiler.lower.task import ALONE, NeedsCopyError, Task, unsupported
from compiler.lower.views import Layout

if TYPE_CHECKING:
    from compiler.lower.body import Body
    from compiler.lower.emit import Emitter
    from compiler.lower.space import Space

HINT = "index one dim at a time (take along one axis), or use one-hot products"


def _make_gather(body: Body, op: Op) -> None:
    operand, index = op.operands
    a = op.attrs
    if len(a.start_index_map) != 1 or a.slice_sizes[a.start_index_map[0]] != 1:
        given = f"requires one indexed dim with slices of size 1, got dims {a.start_index_map}"
        raise unsupported(op, given, HINT)
    body.add_task(op, ALONE, (body.stored(operand, op), body.stored(index, op)))


def _make_scatter(body: Body, op: Op) -> None:
    target, index, update = op.operands
    a = op.attrs
    rows = a.scatter_dims_to_operand_dims
    if a.kind != "add" or len(rows) != 1 or rows != a.inserted_window_dims or a.input_batching_dims:
        given = f"requires rows of one dim to be added, got kind {a.kind} over dims {rows}"
        raise unsupported(op, given, HINT)
    if not target.type.dtype.is_float:
        given = f"requires float elements to add, got {target.type.dtype.value}"
        raise unsupported(op, given, "cast to a float type", "NCC_EVRF060")
    memory = body.owned(op, target)
    body.add_task(op, ALONE, (body.stored(index, op), body.stored(update, op)), memory)


def _batch_labels(labels: Labels, vector_dim: int) -> list[Label]:
    """Labels of the index dims without the index vector."""
    return [label for d, label in enumerate(labels) if d != vector_dim]


def _label_gather(space: Space, task: Task) -> Labels:
    a = task.op.attrs
    operand, index = space.operand(task, 0), space.operand(task, 1)
    gone = a.collapsed_slice_dims + a.operand_batching_dims
    kept = [d for d in range(len(operand)) if d not in gone]
    result: list[Label] = list(fresh(task.result.type.shape))
    for d, dim in zip(kept, a.offset_dims, strict=True):
        if task.result.type.shape[dim] == task.data[0].type.shape[d]:
            result[dim] = operand[d]
    others = [d for d in range(len(result)) if d not in a.offset_dims]
    for label, dim in zip(_batch_labels(index, a.index_vector_dim), others, strict=True):
        if not unify(result[dim], label):
            space.refuse("index and result walk different indices")
    for d, i in zip(a.operand_batching_dims, a.start_indices_batching_dims, strict=True):
        if not unify(operand[d], index[i]):
            space.refuse("batch dims of index and operand walk different indices")
    return tuple(result)


def _emit_gather(emitter: Emitter, task: Task) -> int:
    a = task.op.attrs
    labels, result = list(emitter.space.operand(task, 0)), emitter.space.results[task.result]
    (row,) = a.start_index_map
    gone = a.collapsed_slice_dims + a.operand_batching_dims
    kept = [d for d in range(len(labels)) if d not in gone]
    for d, dim in zip(kept, a.offset_dims, strict=True):
        labels[d] = result[dim]
    for d in a.collapsed_slice_dims:
        labels[d] = ()
    view, stride = _row_view(emitter, task.data[0], tuple(labels), row)
    emitter.note_indexed_load(view.tensor)
    index = emitter.operand(task, 1)
    attrs = {"view": view, "stride": stride, "rows": task.data[0].type.shape[row], "mode": "clamp"}
    span = all_leaves(result)
    return emitter.node("load_indexed", (index,), span, task.result.type.dtype, attrs)


def _row_view(emitter: Emitter, value: Value, labels: Labels, row: int) -> tuple[View, int]:
    """(view of row 0, distance of rows) of a value whose dim `row` is picked by index."""
    place = emitter.storage.place(value)
    pieces = place.layout.dims[row]
    if len(pieces) > 1:
        raise emitter.storage.dense_copy_of(value)
    dims = list(place.layout.dims)
    for d, label in enumerate(labels):
        if not label:
            dims[d] = ()
        elif _elements(label) != place.layout.shape[d]:
            dims[d] = _shortened(value, dims[d], _elements(label))
    layout = Layout(place.layout.offset, tuple(dims))
    view = emitter.view(type(place)(place.tensor, layout), labels, value)
    return view, pieces[0][1] if pieces else 0


def _elements(label: Label) -> int:
    size = 1
    for atom in leaves(label):
        size *= atom.size
    return size


def _shortened(
    value: Value, pieces: tuple[tuple[int, int], ...], size: int
) -> tuple[tuple[int, int], ...]:
    """The first `size` positions of a dim: windows start at 0 where nothing indexes."""
    if len(pieces) != 1:
        raise NeedsCopyError(value)
    return ((size, pieces[0][1]),)


def _label_scatter(space: Space, task: Task) -> Labels:
    a = task.op.attrs
    index, update = space.operand(task, 0), space.operand(task, 1)
    others = [d for d in range(len(update)) if d not in a.update_window_dims]
    for label, dim in zip(_batch_labels(index, a.index_vector_dim), others, strict=True):
        if not unify(update[dim], label):
            space.refuse("index and update walk different indices")
    return update


def _emit_scatter(emitter: Emitter, task: Task) -> int:
    a = task.op.attrs
    update = emitter.space.operand(task, 1)
    (row,) = a.scatter_dims_to_operand_dims
    windows = iter(a.update_window_dims)
    shape = task.result.type.shape
    labels = tuple(() if d == row else update[next(windows)] for d in range(len(shape)))
    view, stride = _row_view(emitter, task.result, labels, row)
    source, index = emitter.operand(task, 1), emitter.operand(task, 0)
    attrs = {"view": view, "stride": stride, "rows": shape[row]}
    span = all_leaves(update)
    emitter.node("store_add_indexed", (source, index), span, task.result.type.dtype, attrs)
    emitter.note_store(task, view)
    return -1


register("gather", Lowering(make=_make_gather, label=_label_gather, emit=_emit_gather))
register("scatter", Lowering(make=_make_scatter, label=_label_scatter, emit=_emit_scatter))
