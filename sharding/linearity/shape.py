"""Ops whose dims are regrouped or repeated, that count, or that move between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.compiler.ir.opdef import Kind as OpKind
from shardwright.compiler.ir.traits import of
from shardwright.compiler.ir.types import Op
from shardwright.sharding.linearity.labels import (
    FREE,
    MIXED,
    ZERO,
    Factor,
    FactoredDim,
    Kind,
    Label,
    fit,
    sample,
)
from shardwright.sharding.linearity.rules import Scope, transfers


@transfers("constant")
def _constant(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    return FREE if any(op.attrs.data) else ZERO


@transfers(*of(OpKind.COLLECTIVE, OpKind.RANK))
def _between_ranks(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Types are global: a collective moves nothing there. An index of ranks is of no sample."""
    if not operands:
        return FREE
    kind = getattr(op.attrs, "reduction", "add")
    return MIXED if kind != "add" and operands[0].kind is Kind.SUM else operands[0]


@transfers("broadcast_in_dim")
def _broadcast(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """A dim of one sample that is repeated counts samples all along."""
    if operands[0].kind is not Kind.SAMPLE:
        return operands[0]
    dims: list[FactoredDim] = [((n, False),) for n in op.attrs.shape]
    for i, d in enumerate(op.attrs.dims):
        dims[d] = operands[0].dims[i]
    return sample(fit(dims, op.attrs.shape))


@transfers("reshape")
def _reshape(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if operands[0].kind is not Kind.SAMPLE:
        return operands[0]
    factors = [f for dim in operands[0].dims for f in dim]
    return sample(_regroup(factors, op.attrs.shape))


def _regroup(factors: Sequence[Factor], shape: Sequence[int]) -> list[FactoredDim]:
    """Row-major factors dealt out to dims of the given sizes; a split factor marks both halves."""
    rest = list(reversed(factors))
    dims: list[FactoredDim] = []
    for size in shape:
        dim: list[Factor] = []
        left = size
        while rest and (left > 1 or rest[-1] == (1, True)):
            n, flag = rest.pop()
            taken = math.gcd(n, left)
            if n > taken > 0 and left > taken:  # sizes interleave: no boundary left to keep
                return [((m, any(f for _, f in factors)),) for m in shape]
            if taken < n:
                rest.append((n // taken, flag))
            dim.append((taken, flag))
            left //= taken
        dims.append(tuple(dim) or ((size, False),))
    return dims
