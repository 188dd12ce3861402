"""Rows picked and updated by index: whether samples stay apart depends on where the row numbers
come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import joined_dim, splat
from shardwright.compiler.ir.ops import Windows, windows_of
from shardwright.compiler.ir.traits import CASTS, LITERALS
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.indices.repeats import Repeats
from shardwright.sharding.linearity.labels import (
    MIXED,
    SUM,
    FactoredDim,
    Kind,
    Label,
    counts_samples,
    dims_of,
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
    windows = windows_of(op.attrs)
    rows, columns = (
        dims_of(x, v.type.shape) for x, v in zip(operands[::-1], op.operands[::-1], strict=True)
    )
    walked = iter([dim for d, dim in enumerate(rows) if d != windows.vector_dim])
    window = iter([columns[d] for d in windows.window_dims(len(columns))])
    rank, inside = op.result.type.rank, windows.moving_dims
    dims = [next(window if d in inside else walked) for d in range(rank)]
    if table.kind is Kind.SAMPLE:
        for own, d in _batching(windows, rank):
            dims[d] = merge_dim(columns[own], dims[d])
    return sample(dims)


def _batching(windows: Windows, rank: int) -> list[tuple[int, int]]:
    """Batching dims (of the operand, of the moved tensor of `rank` dims): samples along them are
    apart.
    """
    walking = [d for d in range(rank) if d not in windows.moving_dims]
    pairs = zip(windows.operand_batching, windows.indices_batching, strict=True)
    return [(own, walking[index - (index > windows.vector_dim)]) for own, index in pairs]


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
    token id), or that all samples have alike (a type of tokens), adds samples up. Samples along
    batching dims are apart already.
    """
    windows, shape = windows_of(op.attrs), op.result.type.shape
    target, rows, moving = (
        dims_of(x, v.type.shape) for x, v in zip(operands, op.operands, strict=True)
    )
    dims, apart = list(target), _batching(windows, len(moving))
    inside = zip(windows.window_dims(len(dims)), windows.moving_dims, strict=True)
    for d, m in (*inside, *apart):
        dims[d] = merge_dim(moving[m], dims[d])
    placed = {*windows.moving_dims, *(m for _, m in apart)}
    among = [dim for d, dim in enumerate(rows) if d not in windows.indices_batching]
    among += [dim for m, dim in enumerate(moving) if m not in placed]
    if any(map(counts_samples, among)) and not _rows_are_alike(op, moving, scope):
        for d, is_data in zip(windows.index_map, _row_is_data(op, scope), strict=True):
            if not is_data:
                dims[d] = ((shape[d], True),)
    return dims


def _rows_are_alike(op: Op, moving: Sequence[FactoredDim], scope: Scope) -> bool:
    """Whether every sample of what is scattered has the same row numbers."""
    windows, indices = windows_of(op.attrs), op.operands[1]
    walking = [d for d in range(len(moving)) if d not in windows.moving_dims]
    walked = [d for d in range(indices.type.rank) if d != windows.vector_dim]
    repeats = Repeats(scope.producers)
    return all(
        repeats.along(indices, d)
        for m, d in zip(walking, walked, strict=True)
        if counts_samples(moving[m])
    )


def _row_is_data(op: Op, scope: Scope) -> list[bool]:
    """Per entry of the index vector, whether it is computed from batch data alone."""
    indices, count = op.operands[1], len(windows_of(op.attrs).index_map)
    if count == 1:
        return [_is_data(indices, scope)]
    producer = scope.producers.get(indices)
    if producer is None or joined_dim(producer) is None or len(producer.operands) != count:
        return [False] * count
    return [_is_data(piece, scope) for piece in producer.operands]


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
