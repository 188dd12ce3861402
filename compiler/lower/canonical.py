"""Rewrites before lowering: gathers and scatters along one axis become elementwise, sorts and
collectives what there is code for.

Picking one element per row by an index is a comparison with a count, a selection and a sum; adding
one is the same backwards. In that form they join the strip regions around them (a cross-entropy
loss becomes one region). Index columns that only count rows are recognised as batch dims first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import LARGEST, DType
from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.facts import joined_dim
from shardwright.compiler.ir.ops import (
    AllToAllAttrs,
    BroadcastInDimAttrs,
    CompareAttrs,
    ConvertAttrs,
    GatherAttrs,
    IotaAttrs,
    ReduceAttrs,
    ReshapeAttrs,
    ScatterAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.lower.level import IndexedLevel
from shardwright.compiler.lower.rank_reduce import rank_reduce
from shardwright.compiler.lower.sorting import sort
from shardwright.compiler.lower.task import unsupported
from shardwright.compiler.lower.whole import as_integers
from shardwright.compiler.passes.dce import dce

MAX_COLUMNS = 8  # indices per row up to which comparing all positions is taken (our choice)


Rule = Callable[[IndexedLevel, Op], Sequence[Value] | None]


def canonical(graph: Graph) -> Graph:
    """`graph` (loop-free) with sorts, and gathers and scatters along an axis, rewritten.

    Raises CompileError for a scatter that combines truth values.
    """
    if not any(op.name in _RULES for op in graph.ops):
        return graph
    level = IndexedLevel(graph)
    for op in graph.ops:
        if all(v in level.replaced for v in op.results):
            continue  # a rule took it together with an earlier op
        rule = _RULES.get(op.name)
        found = rule(level, op) if rule else None
        if found is not None:
            level.replace(op.results, found)
            continue
        level.ops.append(level.update(op))
    return dce(level.finish(graph))


def _gather(level: IndexedLevel, op: Op) -> Value | None:
    """result[b, k] = sum over r of where(r == index[b, k], operand[b, r], 0)."""
    operand, index, attrs = *op.operands, op.attrs
    if len(attrs.start_index_map) > 1:
        index, attrs = _batched(level, operand, index, attrs, op)
    (row, *more) = attrs.start_index_map
    if more or attrs.offset_dims or any(n != 1 for n in attrs.slice_sizes):
        return None
    column = _drop_vector(level, index, attrs.index_vector_dim, op)
    batch = _batch_dims(
        attrs.operand_batching_dims, attrs.start_indices_batching_dims, attrs.index_vector_dim
    )
    if not _is_along_axis(operand, column, batch):
        return None
    length = operand.type.shape[row]
    shape = (*op.result.type.shape, length)
    last = len(shape) - 1
    index = _clamped(level, column, length, op)
    hit = _hits(level, index, shape, last, range(last), op)
    dims = [last if d == row else batch[d] for d in range(operand.type.rank)]
    spread = _placed(level, operand, shape, dims, op)
    zero = level.full(shape, 0, operand.type.dtype, op)
    picked = level.add("select", hit, spread, zero, like=op)
    kind = "or" if operand.type.dtype is DType.PRED else "add"
    return level.add("reduce", picked, attrs=ReduceAttrs(kind, (last,)), like=op)


def _scatter(level: IndexedLevel, op: Op) -> Value | None:
    """result[b, r] = operand[b, r] + sum over k of where(r == index[b, k], update[b, k], 0)."""
    operand, index, update, attrs = *op.operands, op.attrs
    if len(attrs.scatter_dims_to_operand_dims) > 1:
        index, attrs = _batched(level, operand, index, attrs, op)
    (row, *more) = attrs.scatter_dims_to_operand_dims
    if more or attrs.update_window_dims:
        return None
    column = _drop_vector(level, index, attrs.index_vector_dim, op)
    batch = _batch_dims(
        attrs.input_batching_dims, attrs.scatter_indices_batching_dims, attrs.index_vector_dim
    )
    columns = [d for d in range(column.type.rank) if d not in batch.values()]
    single = all(column.type.shape[d] == 1 for d in columns)
    if not _is_along_axis(operand, column, batch) or not (single or attrs.kind != "replace"):
        return None
    rank = operand.type.rank
    shape = operand.type.shape + tuple(column.type.shape[d] for d in columns)
    place = {d: i for i, d in enumerate(columns, rank)} | {i: d for d, i in batch.items()}
    dims = [place[d] for d in range(column.type.rank)]
    hit = _hits(level, column, shape, row, dims, op)
    spread = _placed(level, update, shape, dims, op)
    return _combine(level, op, operand, hit, spread, attrs.kind)


def _combine(
    level: IndexedLevel, op: Op, operand: Value, hit: Value, spread: Value, kind: str
) -> Value:
    """Put the hit updates, or combine them; the trailing dims are index columns."""
    shape, rank, dtype = spread.type.shape, operand.type.rank, operand.type.dtype
    if kind == "replace":
        one = operand.type.shape
        hit = level.add("reshape", hit, attrs=ReshapeAttrs(one), like=op)
        spread = level.add("reshape", spread, attrs=ReshapeAttrs(one), like=op)
        return level.add("select", hit, spread, operand, like=op)
    none = identity(kind, dtype).item()
    held = math.copysign(LARGEST[dtype], none) if dtype in LARGEST and math.isinf(none) else none
    joined = level.add("select", hit, spread, level.full(shape, held, dtype, op), like=op)
    dims = tuple(range(rank, len(shape)))
    if dims:
        joined = level.add("reduce", joined, attrs=ReduceAttrs(kind, dims), like=op)
    if held != none:
        joined = _infinite_again(level, op, joined, held, none)
    return level.add(ELEMENTWISE_OF[kind], operand, joined, like=op)


def _infinite_again(level: IndexedLevel, op: Op, joined: Value, held: float, none: float) -> Value:
    """Rows without an update get the identity, an infinity. The sum over partitions must not see
    one: a transpose by the tensor engine makes NaN of it, so `held` stood for it there.
    """
    shape, dtype = joined.type.shape, joined.type.dtype
    stand_in, infinity = (level.full(shape, number, dtype, op) for number in (held, none))
    empty = level.add("compare", joined, stand_in, attrs=CompareAttrs("EQ"), like=op)
    return level.add("select", empty, infinity, joined, like=op)


def _any_scatter(level: IndexedLevel, op: Op) -> Value | None:
    """Along an axis where possible; integers are added in fp32, as the machine does it (who may is
    the business of `passes/integers.py`).
    """
    found = _scatter(level, op)
    operand, index, update = op.operands
    dtype = operand.type.dtype
    if found is not None or dtype.is_float or op.attrs.kind == "replace":
        return found
    if dtype is DType.PRED:
        raise unsupported(op, "combines i1 elements", "cast to a float type", "NCC_EVRF016")
    if op.attrs.kind != "add" or op.attrs.unique:
        return None
    wide = ConvertAttrs(DType.F32)
    values = [level.add("convert", v, attrs=wide, like=op) for v in (operand, update)]
    total = level.add("scatter", values[0], index, values[1], attrs=op.attrs, like=op)
    return as_integers(partial(level.add, like=op), total, dtype, (operand, update))


def _all_to_all(level: IndexedLevel, op: Op) -> Value | None:
    """Split and concatenate along a leading dim of its own: one part per rank."""
    a, shape = op.attrs, op.operands[0].type.shape
    if a.split_dim == a.concat_dim or a.group_size == 1:
        return None
    n, rank = a.group_size, len(shape)
    cut = (*shape[: a.split_dim], n, shape[a.split_dim] // n, *shape[a.split_dim + 1 :])
    parts = level.add("reshape", op.operands[0], attrs=ReshapeAttrs(cut), like=op)
    order = (a.split_dim, *(d for d in range(rank + 1) if d != a.split_dim))
    parts = level.add("transpose", parts, attrs=TransposeAttrs(order), like=op)
    moved = AllToAllAttrs(0, 0, a.axes, n)
    parts = level.add("all_to_all", parts, attrs=moved, like=op)
    order = (*range(1, a.concat_dim + 1), 0, *range(a.concat_dim + 1, rank + 1))
    parts = level.add("transpose", parts, attrs=TransposeAttrs(order), like=op)
    return level.add("reshape", parts, attrs=ReshapeAttrs(op.result.type.shape), like=op)


def _is_along_axis(operand: Value, column: Value, batch: Mapping[int, int]) -> bool:
    """True when every operand dim but one is a batch dim, and few indices fall on a row."""
    per_row = column.type.num_elements // max(
        1, int(np.prod([column.type.shape[i] for i in batch.values()]))
    )
    return len(batch) == operand.type.rank - 1 and per_row <= MAX_COLUMNS


def _batch_dims(operand: Sequence[int], index: Sequence[int], vector_dim: int) -> dict[int, int]:
    """Operand batch dim -> dim of the index column."""
    return {d: i - (i > vector_dim) for d, i in zip(operand, index, strict=True)}


def _drop_vector(level: IndexedLevel, index: Value, vector_dim: int, op: Op) -> Value:
    """The index without its vector dim of size 1."""
    if vector_dim >= index.type.rank:
        return index
    shape = tuple(n for d, n in enumerate(index.type.shape) if d != vector_dim)
    return level.add("reshape", index, attrs=ReshapeAttrs(shape), like=op)


def _clamped(level: IndexedLevel, index: Value, length: int, op: Op) -> Value:
    """The index inside 0 .. length-1, as a gather clamps it."""
    low, high = (level.full((), n, index.type.dtype, op) for n in (0, length - 1))
    return level.add("clamp", low, index, high, like=op)


def _hits(
    level: IndexedLevel, index: Value, shape: Sequence[int], row: int, dims: Sequence[int], op: Op
) -> Value:
    """position along `row` == index, over `shape`."""
    kind = tensor_type(tuple(shape), index.type.dtype)
    count = level.add("iota", attrs=IotaAttrs(row, kind), like=op)
    spread = _placed(level, index, shape, dims, op)
    return level.add("compare", count, spread, attrs=CompareAttrs("EQ"), like=op)


def _placed(
    level: IndexedLevel, value: Value, shape: Sequence[int], dims: Sequence[int], op: Op
) -> Value:
    """`value` broadcast to `shape`, its dim `i` at `dims[i]` (any order)."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    if order != list(range(len(dims))):
        value = level.add("transpose", value, attrs=TransposeAttrs(tuple(order)), like=op)
    attrs = BroadcastInDimAttrs(tuple(dims[i] for i in order), tuple(shape))
    return level.add("broadcast_in_dim", value, attrs=attrs, like=op)


def _batched(
    level: IndexedLevel, operand: Value, index: Value, attrs: Any, op: Op
) -> tuple[Value, Any]:
    """Index columns that count along one of their own dims, turned into batch dims."""
    vector = attrs.index_vector_dim
    parts = level.made.get(index)
    dims = (
        attrs.start_index_map
        if isinstance(attrs, GatherAttrs)
        else attrs.scatter_dims_to_operand_dims
    )
    if parts is None or joined_dim(parts) != vector or vector != index.type.rank - 1:
        return index, attrs
    if len(parts.operands) != len(dims):
        return index, attrs
    kept: list[tuple[int, Value]] = []
    batch: list[tuple[int, int]] = []
    for d, part in zip(dims, parts.operands, strict=True):
        along = _counts_along(level, part, operand.type.shape[d])
        if along is None or along in [i for _, i in batch]:
            kept.append((d, part))
        else:
            batch.append((d, along))
    if len(kept) != 1 or not batch:
        return index, attrs
    return kept[0][1], _with_batch(attrs, kept[0][0], sorted(batch))


def _with_batch(attrs: Any, row: int, batch: Sequence[tuple[int, int]]) -> Any:
    operand_dims, index_dims = tuple(d for d, _ in batch), tuple(i for _, i in batch)
    if isinstance(attrs, GatherAttrs):
        collapsed = tuple(d for d in attrs.collapsed_slice_dims if d not in operand_dims)
        return replace(
            attrs,
            collapsed_slice_dims=collapsed,
            operand_batching_dims=operand_dims,
            start_indices_batching_dims=index_dims,
            start_index_map=(row,),
        )
    assert isinstance(attrs, ScatterAttrs)
    inserted = tuple(d for d in attrs.inserted_window_dims if d not in operand_dims)
    return replace(
        attrs,
        inserted_window_dims=inserted,
        input_batching_dims=operand_dims,
        scatter_indices_batching_dims=index_dims,
        scatter_dims_to_operand_dims=(row,),
    )


def _counts_along(level: IndexedLevel, part: Value, length: int) -> int | None:
    """The dim along which a constant index column counts 0, 1, ..., length-1; None when it does
    not.
    """
    values = known_elements(level.made, part)
    if values is None:
        return None
    for dim, size in enumerate(part.type.shape):
        ramp = np.arange(size).reshape([-1 if d == dim else 1 for d in range(part.type.rank)])
        if size == length and np.array_equal(values, np.broadcast_to(ramp, values.shape)):
            return dim
    return None


def _single(rule: Callable[[IndexedLevel, Op], Value | None]) -> Rule:
    """`rule` of an op with one result."""

    def run(level: IndexedLevel, op: Op) -> Sequence[Value] | None:
        found = rule(level, op)
        return None if found is None else (found,)

    return run


_RULES: dict[str, Rule] = {
    "all_reduce": _single(rank_reduce),
    "all_to_all": _single(_all_to_all),
    "gather": _single(_gather),
    "reduce_scatter": _single(rank_reduce),
    "scatter": _single(_any_scatter),
    "sort": sort,
}
