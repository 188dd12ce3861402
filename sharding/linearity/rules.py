"""The table of transfer functions: op name -> label of its results from those of its operands.

Ops without an entry are functions of elements. Each file of an op family registers its functions
here; `walk.py` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.tables import entering
from shardwright.sharding.indices.dims import factors
from shardwright.sharding.linearity.labels import (
    FREE,
    MIXED,
    FactoredDim,
    Kind,
    Label,
    dims_of,
    fit,
    merge,
    merge_dim,
)

Labels = dict[Value, Label]
Transfer = Callable[[Op, Sequence[Label], "Scope"], Label]
TRANSFERS: dict[str, Transfer] = {}
transfers = entering(TRANSFERS, "transfer function")


@dataclass(slots=True)
class Scope:
    """What a transfer function may look up: labels and producers of the region at hand."""

    labels: Labels
    producers: dict[Value, Op]


def carried(op: Op, operands: Sequence[Label]) -> list[FactoredDim]:
    """The dims of the result, from those of the operands that walk along them."""
    given = {v: dims_of(x, v.type.shape) for x, v in zip(operands, op.operands, strict=True)}
    dims: list[FactoredDim] = [((n, False),) for n in op.result.type.shape]
    for factor in factors(op):
        found = [given[v][d] for v, d in factor if v in given]
        for v, d in factor:
            if v is op.result and found:
                dims[d] = reduce(merge_dim, found)
    return fit(dims, op.result.type.shape)


def elementwise(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Any function of elements: SAMPLE dims pass through, a SUM does not stay one."""
    if any(label.kind is Kind.SAMPLE for label in operands):
        return merge(operands, op.results[0].type.shape)
    return MIXED if any(label.on_batch for label in operands) else FREE


def no_sum(operands: Sequence[Label]) -> list[Label]:
    """SUM read by a function that is not linear."""
    return [MIXED if label.kind is Kind.SUM else label for label in operands]
