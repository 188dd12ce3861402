"""The label of an op's results from those of its operands.

What an op is linear in, and where its indices go, it says itself (`compiler/ir/opdef.py`); `label`
reads that. Ops of which that does not tell enough have a transfer function, registered by op name
in this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.factors import FactorKind
from shardwright.compiler.ir.facts import combination, factors_of, linear_in, places_of
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.opdef import Kind as OpKind
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.tables import entering
from shardwright.sharding.linearity.labels import (
    FREE,
    MIXED,
    SUM,
    ZERO,
    FactoredDim,
    Kind,
    Label,
    contracted,
    counts_samples,
    dims_of,
    fit,
    merge_dim,
    sample,
)

Labels = dict[Value, Label]
Transfer = Callable[[Op, Sequence[Label], "Scope"], Label]
TRANSFERS: dict[str, Transfer] = {}
transfers = entering(TRANSFERS, "transfer function")
_KEEPS_TAKEN = (OpKind.PART, OpKind.JOIN, OpKind.UPDATE)
"""What these make of a dim that they do not take whole is some of its elements: samples stay."""


@dataclass(slots=True)
class Scope:
    """What a transfer function may look up: labels and producers of the region at hand."""

    labels: Labels
    producers: dict[Value, Op]


def label(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """The label of the results of an op, which are alike."""
    transfer = TRANSFERS.get(op.name)
    if transfer is not None:
        found = transfer(op, operands, scope)
    elif any(each.kind is Kind.SAMPLE for each in operands):
        found = _of_samples(op, operands)
    else:
        found = _of_sums(op, operands)
    if found.kind is Kind.SAMPLE:
        return sample(fit(found.dims, op.results[0].type.shape))
    return found


def _of_sums(op: Op, operands: Sequence[Label]) -> Label:
    """Of operands without sample dims: what is linear in a sum stays one."""
    numbers = range(len(operands))
    for group in linear_in(op):
        inside = {operands[n].kind for n in numbers[group]}
        held = [operands[n] for n in numbers if n not in numbers[group]]
        if inside == {Kind.ZERO}:
            return ZERO
        if inside in ({Kind.SUM}, {Kind.ZERO, Kind.SUM}):
            return MIXED if any(each.on_batch for each in held) else SUM
    return MIXED if any(each.on_batch for each in operands) else FREE


def _of_samples(op: Op, operands: Sequence[Label]) -> Label:
    """Samples go where their dims go, are added up where those are, and are mixed where an op needs
    a dim of them whole.
    """
    count, shape = len(op.operands), op.results[0].type.shape
    own = [dims_of(each, v.type.shape) for each, v in zip(operands, op.operands, strict=True)]
    left = {
        (n, d) for n, dims in enumerate(own) for d, dim in enumerate(dims) if counts_samples(dim)
    }
    made: list[FactoredDim] = [((n, False),) for n in shape]
    for factor in factors_of(op):
        if factor.kind is FactorKind.GROUPED:  # a part of its dim may be no sample's
            continue
        if (to := factor.of(count)) is not None:
            for n, d in factor.places:
                if n < count:
                    made[to] = merge_dim(made[to], own[n][d])
        if to is not None or factor.kind is FactorKind.COMBINED:
            left.difference_update(factor.places)
    kind = OPS[op.name].kind
    if left and kind not in _KEEPS_TAKEN:
        return MIXED
    for n, d in sorted(left):
        made[d] = merge_dim(made[d], own[n][d])
    if kind is OpKind.UPDATE and _is_moved(op, operands):
        made = [((n, True),) for n in shape]
    return contracted(fit(made, shape), combination(op) == "add")


def _is_moved(op: Op, operands: Sequence[Label]) -> bool:
    """Whether where a part is written depends on the batch."""
    places = places_of(op)
    return any(each.on_batch for each, v in zip(operands, op.operands, strict=True) if v in places)
