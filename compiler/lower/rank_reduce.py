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
from shardwright.compiler.ir.ops import AllGatherAttrs, AllToAllAttrs
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.lower.collective import REDUCTIONS
from shardwright.compiler.lower.level import Site

_OF_TRUTH = {
    **dict.fromkeys(("and", "min", "multiply"), "min"),
    **dict.fromkeys(("or", "max", "add"), "max"),
}
"""A reduction of truth values (a sum of them is `or`) -> that of 0 and 1."""


def rank_reduce(b: Site, op: Op) -> Value | None:
    """An `all_reduce` or `reduce_scatter` in terms of what the engine has; None where it has it."""
    attrs, dtype = op.attrs, op.result.type.dtype
    if attrs.group_size == 1 or (dtype.is_float and attrs.reduction in REDUCTIONS):
        return None
    if dtype is DType.PRED and attrs.reduction in _OF_TRUTH:
        return _of_truth(b, op)
    return _gathered(b, op) if resized_dim(op) is None else _scattered(b, op)


def _of_truth(b: Site, op: Op) -> Value:
    attrs = replace(op.attrs, reduction=_OF_TRUTH[op.attrs.reduction])
    reduced = b.op(op.name, b.convert(op.operands[0], DType.F32), attrs=attrs)
    return b.compare(reduced, 0, "NE")


def _gathered(b: Site, op: Op) -> Value:
    """Everything everywhere, reduced there."""
    (value,), attrs = op.operands, op.attrs
    own = b.reshape(value, (1, *value.type.shape))
    every = b.op("all_gather", own, attrs=AllGatherAttrs(0, attrs.axes, attrs.group_size))
    return b.reduce(every, attrs.reduction, (0,))


def _scattered(b: Site, op: Op) -> Value:
    """Every rank's part of `dim` to that rank, and reduced there."""
    shape, attrs = op.operands[0].type.shape, op.attrs
    dim, ranks = attrs.dim, attrs.group_size
    parts = b.reshape(op.operands[0], (*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :]))
    mine = b.op("all_to_all", parts, attrs=AllToAllAttrs(dim, dim, attrs.axes, ranks))
    return b.reduce(mine, attrs.reduction, (dim,))
