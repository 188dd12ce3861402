"""Ops that fold dims: folding samples by addition makes a sum over samples, any other way mixes
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.facts import combination
from shardwright.compiler.ir.types import Op
from shardwright.sharding.indices.dims import factors
from shardwright.sharding.linearity.labels import (
    FREE,
    MIXED,
    SUM,
    Kind,
    Label,
    contracted,
    counts_samples,
    sample,
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


@transfers("dot_general", "convolution")
def _product(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Dims are kept or summed; samples that windows move over or groups split are mixed."""
    lhs, rhs = operands
    if Kind.SAMPLE not in (lhs.kind, rhs.kind):
        return _multiply_kinds(lhs, rhs)
    return MIXED if _splits(op, operands) else contracted(carried(op, operands), True)


def _splits(op: Op, operands: Sequence[Label]) -> bool:
    """True when an operand has samples along a dim that no index of `op` walks along."""
    tied = {dim for factor in factors(op) for dim in factor}
    return any(
        counts_samples(dim)
        for label, v in zip(operands, op.operands, strict=True)
        for d, dim in enumerate(label.dims)
        if (v, d) not in tied
    )


@transfers("reduce_window", "select_and_scatter")
def _windowed(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Per sample unless a window spans samples; a window of sums is linear in its last operand."""
    if Kind.SAMPLE in [label.kind for label in operands]:
        return MIXED if _splits(op, operands) else sample(carried(op, operands))
    if combination(op) in ("", "add") and not any(label.on_batch for label in operands[:-1]):
        return operands[-1]
    return elementwise(op, operands, scope)


@transfers("sort")
def _sort(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Rows move together; samples that are sorted are mixed."""
    return MIXED if _splits(op, operands) else elementwise(op, operands, scope)


def _multiply_kinds(lhs: Label, rhs: Label) -> Label:
    """A product of values without sample dims."""
    kinds = {lhs.kind, rhs.kind}
    if Kind.MIXED in kinds or kinds == {Kind.SUM}:
        return MIXED
    return SUM if Kind.SUM in kinds else FREE
