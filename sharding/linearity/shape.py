"""Ops that move elements: sample dims move with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.compiler.ir.ops import BroadcastInDimAttrs
from shardwright.compiler.ir.types import Op
from shardwright.sharding.linearity.labels import (
    MIXED,
    Factor,
    FactoredDim,
    Kind,
    Label,
    dims_of,
    fit,
    join,
    merge,
    sample,
    total,
)
from shardwright.sharding.linearity.rules import Scope, carried, elementwise, no_sum, transfers


@transfers("broadcast_in_dim", "transpose")
def _move(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if operands[0].kind is not Kind.SAMPLE:
        return operands[0]
    dims = carried(op, operands)
    if isinstance(op.attrs, BroadcastInDimAttrs):  # a stretched dim of samples is one, too
        for i, d in enumerate(op.attrs.dims):
            dims[d] = operands[0].dims[i]
    return sample(dims)


@transfers("slice", "dynamic_slice")
def _slice(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if any(label.on_batch for label in operands[1:]):
        return elementwise(op, no_sum(operands[:1]) + list(operands[1:]), scope)
    return operands[0]


@transfers("pad")
def _pad(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if (label := total(operands)) is not None:
        return label
    if operands[0].kind is Kind.SAMPLE:
        return operands[0]
    return elementwise(op, operands, scope)


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


@transfers("dynamic_update_slice")
def _update_slice(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    target, update, starts = operands[0], operands[1], operands[2:]
    shape = op.result.type.shape
    moved = any(label.on_batch for label in starts)
    if Kind.SAMPLE in (target.kind, update.kind):
        if moved:
            return sample([((n, True),) for n in shape])
        own = fit(dims_of(update, op.operands[1].type.shape), shape)
        return merge([target, Label(Kind.SAMPLE, tuple(own))], shape)
    if moved:
        return MIXED
    return join(target, update, op.result)
