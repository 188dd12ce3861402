"""Functions of elements and collectives that keep a sum a sum: linear ones, and choices that data
does not make.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.facts import joined_dim
from shardwright.compiler.ir.types import Op
from shardwright.sharding.linearity.labels import (
    FREE,
    MIXED,
    SUM,
    ZERO,
    FactoredDim,
    Kind,
    Label,
    all_in,
    dims_of,
    fit,
    merge_dim,
    sample,
)
from shardwright.sharding.linearity.rules import Scope, elementwise, no_sum, transfers


@transfers("add", "subtract", "concatenate")
def _sum_of(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if all_in(operands, Kind.ZERO):
        return ZERO
    if all_in(operands, Kind.ZERO, Kind.SUM):
        return SUM
    if joined_dim(op) is not None:
        return _concatenate(op, operands)
    return elementwise(op, operands, scope)


def _concatenate(op: Op, operands: Sequence[Label]) -> Label:
    """Joined along a dim: the joined dim is one factor."""
    if not any(label.kind is Kind.SAMPLE for label in operands):
        return MIXED if any(label.on_batch for label in operands) else FREE
    dims = [((n, False),) for n in op.result.type.shape]
    merged: list[FactoredDim] = list(dims)
    for label, operand in zip(operands, op.operands, strict=True):
        own = dims_of(label, operand.type.shape)
        merged = [merge_dim(a, b) for a, b in zip(own, merged, strict=True)]
    return sample(fit(merged, op.result.type.shape))


@transfers(
    *("move_to", "negate", "reverse"),
    *("all_gather", "all_slice", "all_to_all", "collective_permute"),
)
def _linear(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    return operands[0]


@transfers("reduce_scatter", "all_reduce")
def _reduction(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if op.attrs.reduction == "add" or operands[0].kind is not Kind.SUM:
        return operands[0]
    return MIXED


@transfers("convert")
def _convert(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    to_float = op.result.type.dtype.is_float
    return operands[0] if to_float else elementwise(op, no_sum(operands), scope)


@transfers("multiply")
def _multiply(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    kinds = sorted(label.kind.value for label in operands)
    if kinds in (["free", "sum"], ["sum", "zero"]):
        return SUM
    return ZERO if kinds == ["zero", "zero"] else elementwise(op, operands, scope)


@transfers("divide")
def _divide(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if operands[0].kind is Kind.SUM and operands[1].kind is Kind.FREE:
        return SUM
    return elementwise(op, operands, scope)


@transfers("select")
def _select(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    chosen = operands[1:]
    if operands[0].kind in (Kind.ZERO, Kind.FREE) and all_in(chosen, Kind.ZERO, Kind.SUM):
        return SUM if any(label.kind is Kind.SUM for label in chosen) else ZERO
    return elementwise(op, operands, scope)


@transfers("constant")
def _constant(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    return FREE if any(op.attrs.data) else ZERO


@transfers("iota", "axis_index")
def _free(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    return FREE
