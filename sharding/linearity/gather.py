"""Rows picked and updated by index: whether samples stay apart depends on where the row numbers
come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import joined_dim, splat
from shardwright.compiler.ir.traits import CASTS, LITERALS
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.linearity.labels import (
    MIXED,
    SUM,
    FactoredDim,
    Kind,
    Label,
    counts_samples,
    dims_of,
    fit,
    join,
    merge_dim,
    sample,
)
from shardwright.sharding.linearity.rules import Scope, transfers


@transfers("gather")
def _gather(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    table, indices = operands
    if not indices.on_batch and table.kind is not Kind.SAMPLE:
        return table
    if Kind.SAMPLE not in (table.kind, indices.kind):
        return MIXED
    attrs = op.attrs
    rows = dims_of(indices, op.operands[1].type.shape)
    walked = iter([dim for d, dim in enumerate(rows) if d != attrs.index_vector_dim])
    columns = dims_of(table, op.operands[0].type.shape)
    gone = attrs.collapsed_slice_dims + attrs.operand_batching_dims
    window = iter([dim for d, dim in enumerate(columns) if d not in gone])
    dims = [
        next(window) if d in attrs.offset_dims else next(walked) for d in range(op.result.type.rank)
    ]
    if attrs.operand_batching_dims and table.kind is Kind.SAMPLE:
        dims = _mark_batching(op, dims, columns)
    return sample(fit(dims, op.result.type.shape))


def _mark_batching(
    op: Op, dims: Sequence[FactoredDim], columns: Sequence[FactoredDim]
) -> list[FactoredDim]:
    """Result dims of batching dims count samples when the operand's do."""
    attrs = op.attrs
    batch = [d for d in range(len(dims)) if d not in attrs.offset_dims]
    marked = list(dims)
    for own, index in zip(
        attrs.operand_batching_dims, attrs.start_indices_batching_dims, strict=True
    ):
        d = batch[index - (index > attrs.index_vector_dim)]
        marked[d] = merge_dim(columns[own], marked[d])
    return marked


@transfers("scatter")
def _scatter(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    target, indices, updates = operands
    if not (indices.on_batch or updates.on_batch):
        return join(target, updates, op.result)
    if updates.kind is Kind.SUM and not indices.on_batch and op.attrs.kind == "add":
        return join(target, updates, op.result)
    if Kind.SAMPLE not in (target.kind, indices.kind, updates.kind):
        return MIXED
    dims = _scattered_dims(op, operands, scope)
    if any(counts_samples(dim) for dim in dims):
        return sample(dims)
    added = op.attrs.kind == "add" and target.kind in (Kind.ZERO, Kind.SUM)
    return SUM if added else MIXED


def _scattered_dims(op: Op, operands: Sequence[Label], scope: Scope) -> list[FactoredDim]:
    """Dims of a scatter's result: those of the operand, of the window, and rows picked by position.

    Where updates of several samples are scattered, a row number computed from positions (iota)
    keeps samples apart, so that its dim still counts samples; one computed from batch data alone (a
    token id) adds samples up. Samples along batching dims are apart already.
    """
    attrs, target = op.attrs, op.operands[0]
    dims = list(dims_of(operands[0], target.type.shape))
    moving = dims_of(operands[2], op.operands[2].type.shape)
    gone = attrs.inserted_window_dims + attrs.input_batching_dims
    kept = [d for d in range(target.type.rank) if d not in gone]
    for d, m in zip(kept, attrs.update_window_dims, strict=True):
        dims[d] = merge_dim(moving[m], dims[d])
    batch = [d for d in range(len(moving)) if d not in attrs.update_window_dims]
    apart = attrs.scatter_indices_batching_dims
    steps = {index: batch[index - (index > attrs.index_vector_dim)] for index in apart}
    for d, index in zip(attrs.input_batching_dims, apart, strict=True):
        dims[d] = merge_dim(moving[steps[index]], dims[d])
    rows = dims_of(operands[1], op.operands[1].type.shape)
    among = [dim for d, dim in enumerate(rows) if d not in apart]
    among += [moving[m] for m in batch if m not in steps.values()]
    if any(map(counts_samples, among)):
        picked = zip(attrs.scatter_dims_to_operand_dims, _row_is_data(op, scope), strict=True)
        for d, _ in (pair for pair in picked if not pair[1]):
            dims[d] = ((target.type.shape[d], True),)
    return fit(dims, target.type.shape)


def _row_is_data(op: Op, scope: Scope) -> list[bool]:
    """Per entry of the index vector, whether it is computed from batch data alone."""
    indices, count = op.operands[1], len(op.attrs.scatter_dims_to_operand_dims)
    if count == 1:
        return [_is_data(indices, scope)]
    producer = scope.producers.get(indices)
    pieces: Sequence[Value] = ()
    if producer is not None and joined_dim(producer) is not None:
        pieces = producer.operands
    if len(pieces) != count:
        return [False] * count
    return [_is_data(piece, scope) for piece in pieces]


def _is_data(value: Value, scope: Scope) -> bool:
    """True when `value` depends on the batch and on no position."""
    if not scope.labels[value].on_batch:
        return False
    seen, todo = {value}, [value]
    while todo:
        op = scope.producers.get(todo.pop())
        if op is None:
            continue
        if op.name in LITERALS and splat(op) is None:
            return False
        follow = op.name in CASTS  # a position may hide behind a float
        fresh = [v for v in op.operands if v not in seen and (follow or _is_index(v))]
        seen.update(fresh)
        todo.extend(fresh)
    return True


def _is_index(value: Value) -> bool:
    """Integers and predicates: what row numbers are computed from."""
    return value.type.dtype is DType.PRED or value.type.dtype.is_integer
