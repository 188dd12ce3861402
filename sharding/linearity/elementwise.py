"""Functions of elements and collectives that keep a sum a sum: linear ones, and choices that data
does not make.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.facts import combination, joined_dim, stored
from shardwright.compiler.ir.types import Op
from shardwright.sharding.linearity.labels import (
    FREE,
    MIXED,
    SUM,
    ZERO,
    FactoredDim,
    Kind,
    Label,
    dims_of,
    merge_dim,
    sample,
    total,
)
from shardwright.sharding.linearity.rules import Scope, elementwise, no_sum, transfers


@transfers("add", "subtract", "concatenate")
def _sum_of(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if (label := total(operands)) is not None:
        return label
    if joined_dim(op) is not None:
        return _concatenate(op, operands, scope)
    return elementwise(op, operands, scope)


def _concatenate(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Joined along a dim: the joined dim is one factor."""
    if not any(label.kind is Kind.SAMPLE for label in operands):
        return elementwise(op, operands, scope)
    merged: list[FactoredDim] = [((n, False),) for n in op.result.type.shape]
    for label, operand in zip(operands, op.operands, strict=True):
        own = dims_of(label, operand.type.shape)
        merged = [merge_dim(a, b) for a, b in zip(own, merged, strict=True)]
    return sample(merged)


@transfers(
    *("move_to", "negate", "reverse", "reduce_scatter", "all_reduce"),
    *("all_gather", "all_slice", "all_to_all", "collective_permute"),
)
def _linear(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    is_other = combination(op) not in ("", "add")
    return MIXED if is_other and operands[0].kind is Kind.SUM else operands[0]


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
    label = total(operands[1:])
    if label is not None and not operands[0].on_batch:
        return label
    return elementwise(op, operands, scope)


@transfers("constant", "iota", "axis_index")
def _free(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    held = stored(op)
    return ZERO if held is not None and not any(held.data) else FREE
