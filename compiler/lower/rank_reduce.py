"""Reductions over ranks that the collective engine does not have: of truth values and integers, and
products.

It adds and compares floats. Truth values are 0 and 1 of fp32, whose minimum is `and` and whose
maximum is `or`; what else there is goes whole to every rank, which reduces it itself: exact, and
small (a count, a metric, a flag).
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import resized_dim
from shardwright.compiler.ir.ops import (
    AllGatherAttrs,
    AllToAllAttrs,
    CompareAttrs,
    ConvertAttrs,
    ReduceAttrs,
    ReshapeAttrs,
)
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.lower.collective import REDUCTIONS
from shardwright.compiler.lower.level import IndexedLevel

_OF_TRUTH = {
    **dict.fromkeys(("and", "min", "multiply"), "min"),
    **dict.fromkeys(("or", "max", "add"), "max"),
}
"""A reduction of truth values (a sum of them is `or`) -> that of 0 and 1."""


def rank_reduce(level: IndexedLevel, op: Op) -> Value | None:
    """An `all_reduce` or `reduce_scatter` in terms of what the engine has; None where it has it."""
    attrs, dtype = op.attrs, op.result.type.dtype
    if attrs.group_size == 1 or (dtype.is_float and attrs.reduction in REDUCTIONS):
        return None
    if dtype is DType.PRED and attrs.reduction in _OF_TRUTH:
        return _of_truth(level, op)
    return _gathered(level, op) if resized_dim(op) is None else _scattered(level, op)


def _of_truth(level: IndexedLevel, op: Op) -> Value:
    number = level.add("convert", op.operands[0], attrs=ConvertAttrs(DType.F32), like=op)
    attrs = replace(op.attrs, reduction=_OF_TRUTH[op.attrs.reduction])
    reduced = level.add(op.name, number, attrs=attrs, like=op)
    zero = level.full(reduced.type.shape, 0, DType.F32, op)
    return level.add("compare", reduced, zero, attrs=CompareAttrs("NE"), like=op)


def _gathered(level: IndexedLevel, op: Op) -> Value:
    """Everything everywhere, reduced there."""
    shape, attrs = op.operands[0].type.shape, op.attrs
    own = level.add("reshape", op.operands[0], attrs=ReshapeAttrs((1, *shape)), like=op)
    gather = AllGatherAttrs(0, attrs.axes, attrs.group_size)
    every = level.add("all_gather", own, attrs=gather, like=op)
    return level.add("reduce", every, attrs=ReduceAttrs(attrs.reduction, (0,)), like=op)


def _scattered(level: IndexedLevel, op: Op) -> Value:
    """Every rank's part of `dim` to that rank, and reduced there."""
    shape, attrs = op.operands[0].type.shape, op.attrs
    dim, ranks = attrs.dim, attrs.group_size
    cut = (*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :])
    parts = level.add("reshape", op.operands[0], attrs=ReshapeAttrs(cut), like=op)
    moved = AllToAllAttrs(dim, dim, attrs.axes, ranks)
    mine = level.add("all_to_all", parts, attrs=moved, like=op)
    return level.add("reduce", mine, attrs=ReduceAttrs(attrs.reduction, (dim,)), like=op)
