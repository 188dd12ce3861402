"""The table of transfer functions: op name -> label of its results from those of its operands.

Ops without an entry are functions of elements. Each file of an op family registers its functions
here; `walk.py` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.tables import entering
from shardwright.sharding.linearity.labels import FREE, MIXED, Kind, Label, merge

Labels = dict[Value, Label]
Transfer = Callable[[Op, Sequence[Label], "Scope"], Label]
TRANSFERS: dict[str, Transfer] = {}
transfers = entering(TRANSFERS, "transfer function")


@dataclass(slots=True)
class Scope:
    """What a transfer function may look up: labels and producers of the region at hand."""

    labels: Labels
    producers: dict[Value, Op]


def elementwise(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Any function of elements: SAMPLE dims pass through, a SUM does not stay one."""
    if any(label.kind is Kind.SAMPLE for label in operands):
        return merge(operands, op.results[0].type.shape)
    return MIXED if any(label.on_batch for label in operands) else FREE


def no_sum(operands: Sequence[Label]) -> list[Label]:
    """SUM read by a function that is not linear."""
    return [MIXED if label.kind is Kind.SUM else label for label in operands]
