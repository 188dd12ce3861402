"""Ops that fold dims: folding samples by addition makes a sum over samples, any other way mixes
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.facts import combination
from shardwright.compiler.ir.types import Op
from shardwright.sharding.linearity.labels import (
    FREE,
    MIXED,
    SUM,
    Kind,
    Label,
    contracted,
    counts_samples,
    dims_of,
    merge,
)
from shardwright.sharding.linearity.rules import Scope, carried, elementwise, transfers


@transfers("reduce")
def _reduce(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    label, attrs = operands[0], op.attrs
    if label.kind is Kind.SUM:
        return SUM if attrs.kind == "add" else MIXED
    if label.kind is not Kind.SAMPLE:
        return FREE if label.kind is Kind.ZERO and attrs.kind != "add" else label
    return contracted(carried(op, operands), attrs.kind == "add")


@transfers("dot_general")
def _dot(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    lhs, rhs = operands
    if Kind.SAMPLE not in (lhs.kind, rhs.kind):
        return _multiply_kinds(lhs, rhs)
    return contracted(carried(op, operands), True)


@transfers("convolution")
def _convolution(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Batch and features are kept, input features and taps are summed; samples that windows or
    groups split are mixed.
    """
    lhs, rhs = operands
    if Kind.SAMPLE not in (lhs.kind, rhs.kind):
        return _multiply_kinds(lhs, rhs)
    a = op.attrs
    left, right = (dims_of(x, v.type.shape) for x, v in zip(operands, op.operands, strict=True))
    mixed = [left[d] for d in a.lhs[2:]] + [right[d] for d in a.rhs[2:]]
    mixed += [left[a.lhs[0]]] if a.batch_groups > 1 else []
    mixed += [left[a.lhs[1]]] if a.feature_groups > 1 else []
    if any(counts_samples(dim) for dim in mixed):
        return MIXED
    return contracted(carried(op, operands), True)


@transfers("reduce_window", "select_and_scatter")
def _windowed(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Per sample unless a window spans samples; a window of sums is linear in its last operand."""
    attrs = op.attrs
    if Kind.SAMPLE not in [label.kind for label in operands]:
        if combination(op) in ("", "add") and not any(label.on_batch for label in operands[:-1]):
            return operands[-1]
        return MIXED if any(label.on_batch for label in operands) else FREE
    label = merge(operands, op.operands[0].type.shape)
    rows = list(zip(attrs.sizes, attrs.strides, attrs.low, attrs.high, strict=True))
    spanned = [dim for dim, row in zip(label.dims, rows, strict=True) if row != (1, 1, 0, 0)]
    return MIXED if any(counts_samples(dim) for dim in spanned) else label


@transfers("sort")
def _sort(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Rows move together; samples that are sorted are mixed."""
    label = elementwise(op, operands, scope)
    if label.kind is Kind.SAMPLE and counts_samples(label.dims[op.attrs.dim]):
        return MIXED
    return label


def _multiply_kinds(lhs: Label, rhs: Label) -> Label:
    """A product of values without sample dims."""
    kinds = {lhs.kind, rhs.kind}
    if Kind.MIXED in kinds or kinds == {Kind.SUM}:
        return MIXED
    return SUM if Kind.SUM in kinds else FREE
