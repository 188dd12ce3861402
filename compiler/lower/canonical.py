"""Rewrites before lowering: gathers and scatters along one axis become elementwise, sorts and
collectives what there is code for.

Picking one element per row by an index is a comparison with a count, a selection and a sum; adding
one is the same backwards. In that form they join the loop fusions around them (a cross-entropy
loss becomes one kernel). Index columns that only count rows are recognised as batch dims first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.dtypes import LARGEST, DType
from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.facts import joined_dim
from shardwright.compiler.ir.ops import AllToAllAttrs, ScatterAttrs
from shardwright.compiler.ir.ops.gather import last_starts, windows_of
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.lower.level import Rule, Site, rewritten
from shardwright.compiler.lower.rank_reduce import rank_reduce
from shardwright.compiler.lower.sorting import sort
from shardwright.compiler.lower.task import unsupported
from shardwright.compiler.lower.whole import as_integers
from shardwright.compiler.passes.dce import dce

MAX_COLUMNS = 8  # indices per row up to which comparing all positions is taken (our choice)


def canonical(graph: Graph) -> Graph:
    """`graph` (loop-free) with sorts, and gathers and scatters along an axis, rewritten.

    Raises CompileError for a scatter that combines truth values.
    """
    if not any(op.name in _RULES for op in graph.ops):
        return graph
    return dce(rewritten(graph, lambda op: _RULES.get(op.name)))


@dataclass(frozen=True, slots=True)
class _Axis:
    """Single elements of rows: `column` says where along dim `row` of the operand; all other dims
    of the operand are batch dims (`batch`: operand dim -> dim of the column).
    """

    row: int
    column: Value
    batch: dict[int, int]


def _axis(b: Site, op: Op) -> _Axis | None:
    """The axis of a gather or scatter along one, if few indices fall on a row."""
    operand, index = op.operands[:2]
    windows = windows_of(op.attrs)
    vector, dims = windows.vector_dim, windows.index_map
    batch = dict(zip(windows.operand_batching, windows.indices_batching, strict=True))
    if len(dims) > 1 and (counted := _counted(b, operand, index, dims, vector)):
        index, dims, batch = counted
    if len(dims) != 1 or windows.moving_dims:
        return None
    batch = {d: i - (i > vector) for d, i in batch.items()}
    if vector < index.type.rank:
        shape = index.type.shape
        index = b.reshape(index, (*shape[:vector], *shape[vector + 1 :]))
    rows = math.prod(index.type.shape[i] for i in batch.values())
    few = index.type.num_elements // max(1, rows) <= MAX_COLUMNS
    return _Axis(dims[0], index, batch) if few and len(batch) == operand.type.rank - 1 else None


def _counted(
    b: Site, operand: Value, index: Value, dims: Sequence[int], vector: int
) -> tuple[Value, tuple[int, ...], dict[int, int]] | None:
    """(column, row, batch) where all columns of an index but one count along dims of their own."""
    parts = b.level.made.get(index)
    if parts is None or joined_dim(parts) != vector or vector != index.type.rank - 1:
        return None
    if len(parts.operands) != len(dims):
        return None
    kept: list[tuple[int, Value]] = []
    batch: dict[int, int] = {}
    for d, part in zip(dims, parts.operands, strict=True):
        along = _counts_along(b, part, operand.type.shape[d])
        if along is None or along in batch.values():
            kept.append((d, b.level.now(part)))
        else:
            batch[d] = along
    if len(kept) != 1:
        return None
    ((row, column),) = kept
    return column, (row,), batch


def _counts_along(b: Site, part: Value, length: int) -> int | None:
    """The dim along which a constant index column counts 0, 1, ..., length-1; else None."""
    values = known_elements(b.level.made, part)
    if values is None:
        return None
    for dim, size in enumerate(part.type.shape):
        ramp = np.arange(size).reshape([-1 if d == dim else 1 for d in range(part.type.rank)])
        if size == length and np.array_equal(values, np.broadcast_to(ramp, values.shape)):
            return dim
    return None


def _gather(b: Site, op: Op) -> Value | None:
    """result[b, k] = sum over r of where(r == index[b, k], operand[b, r], 0)."""
    operand = op.operands[0]
    axis = _axis(b, op) if all(n == 1 for n in op.attrs.slice_sizes) else None
    if axis is None:
        return None
    row, dtype = axis.row, axis.column.type.dtype
    length = operand.type.shape[row]
    shape = (*op.result.type.shape, length)
    last = len(shape) - 1
    end = last_starts(op)[op.attrs.start_index_map.index(row)]
    low, high = (b.full((), n, dtype) for n in (0, end))  # as a gather clamps
    index = b.op("clamp", low, axis.column, high)
    hit = _hits(b, index, shape, last, range(last))
    dims = [last if d == row else axis.batch[d] for d in range(operand.type.rank)]
    spread = _placed(b, operand, shape, dims)
    picked = b.op("select", hit, spread, 0)
    return b.reduce(picked, "or" if operand.type.dtype is DType.PRED else "add", (last,))


def _scatter(b: Site, op: Op) -> Value | None:
    """result[b, r] = operand[b, r] + sum over k of where(r == index[b, k], update[b, k], 0)."""
    operand, _, update = op.operands[:3]
    axis, attrs = _axis(b, op), op.attrs
    if axis is None:
        return None
    column, batch = axis.column.type, axis.batch
    columns = [d for d in range(column.rank) if d not in batch.values()]
    single = all(column.shape[d] == 1 for d in columns)
    if not (single or attrs.kind != "replace"):
        return None
    shape = operand.type.shape + tuple(column.shape[d] for d in columns)
    place = {d: i for i, d in enumerate(columns, operand.type.rank)}
    place |= {i: d for d, i in batch.items()}
    dims = [place[d] for d in range(column.rank)]
    hit = _hits(b, axis.column, shape, axis.row, dims)
    return _combine(b, operand, hit, _placed(b, update, shape, dims), attrs)


def _combine(b: Site, operand: Value, hit: Value, spread: Value, attrs: ScatterAttrs) -> Value:
    """Put the hit updates, or combine them; the trailing dims are index columns."""
    shape, rank, dtype, kind = spread.type.shape, operand.type.rank, operand.type.dtype, attrs.kind
    if kind == "replace":
        hit, spread = (b.reshape(v, operand.type.shape) for v in (hit, spread))
        return b.op("select", hit, spread, operand)
    none = identity(kind, dtype).item()
    held = math.copysign(LARGEST[dtype], none) if dtype in LARGEST and math.isinf(none) else none
    joined = b.op("select", hit, spread, held)
    if len(shape) > rank:
        joined = b.reduce(joined, kind, range(rank, len(shape)))
    if held != none:
        joined = _infinite_again(b, joined, held, none)
    return b.op(ELEMENTWISE_OF[kind], operand, joined)


def _infinite_again(b: Site, joined: Value, held: float, none: float) -> Value:
    """Rows without an update get the identity, an infinity. The sum over partitions must not see
    one: a transpose by the tensor engine makes NaN of it, so `held` stood for it there.
    """
    stand_in, infinity = (b.splat(number, joined) for number in (held, none))
    return b.op("select", b.compare(joined, stand_in, "EQ"), infinity, joined)


def _any_scatter(b: Site, op: Op) -> Value | None:
    """Along an axis where possible; integers are added in fp32, as the machine does it (who may is
    the business of `passes/integers.py`).
    """
    found = _scatter(b, op)
    operand, index, update, *watched = op.operands
    dtype = operand.type.dtype
    if found is not None or dtype.is_float or op.attrs.kind == "replace":
        return found
    if dtype is DType.PRED:
        raise unsupported(op, "combines i1 elements", "cast to a float type", "NCC_EVRF016")
    if op.attrs.kind != "add" or op.attrs.unique:
        return None
    wide = [b.convert(v, DType.F32) for v in (operand, update)]
    total = b.op("scatter", wide[0], index, wide[1], *watched, attrs=op.attrs)
    return as_integers(b, total, dtype, (operand, update))


def _all_to_all(b: Site, op: Op) -> Value | None:
    """Split and concatenate along a leading dim of its own: one part per rank."""
    a, shape = op.attrs, op.operands[0].type.shape
    if a.split_dim == a.concat_dim or a.group_size == 1:
        return None
    n, rank = a.group_size, len(shape)
    cut = (*shape[: a.split_dim], n, shape[a.split_dim] // n, *shape[a.split_dim + 1 :])
    order = (a.split_dim, *(d for d in range(rank + 1) if d != a.split_dim))
    parts = b.transpose(b.reshape(op.operands[0], cut), order)
    parts = b.op("all_to_all", parts, attrs=AllToAllAttrs(0, 0, a.axes, n))
    order = (*range(1, a.concat_dim + 1), 0, *range(a.concat_dim + 1, rank + 1))
    return b.reshape(b.transpose(parts, order), op.result.type.shape)


def _hits(b: Site, index: Value, shape: Sequence[int], row: int, dims: Sequence[int]) -> Value:
    """position along `row` == index, over `shape`."""
    count = b.iota(shape, row, index.type.dtype)
    return b.compare(count, _placed(b, index, shape, dims), "EQ")


def _placed(b: Site, value: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
    """`value` broadcast to `shape`, its dim `i` at `dims[i]` (any order)."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    if order != list(range(len(dims))):
        value = b.transpose(value, order)
    return b.broadcast(value, shape, [dims[i] for i in order])


_RULES: dict[str, Rule] = {
    "all_reduce": rank_reduce,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "reduce_scatter": rank_reduce,
    "scatter": _any_scatter,
    "sort": sort,
}
