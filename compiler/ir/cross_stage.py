"""Cross-stage order: every stage starts the collectives over pipeline stages in one order.

Stages run programs of their own, and which order is best differs between them. The order that
counts is decided before the stages are divided: that of the ops in the program they are cut from.
Whatever reorders ops afterwards keeps it: pieces of straight-line code (`outline/pieces.py`) and
tasks of a function (`lower/order.py`) stand behind the last such collective before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.compiler.ir.types import Op
from shardwright.compiler.neff.schedule import STAGE_AXIS


def is_cross_stage(op: Op) -> bool:
    """True for a collective in which all stages take part."""
    return op.name == "all_reduce" and STAGE_AXIS in op.attrs.axes


def consecutive(ops: Iterable[Op]) -> Iterator[tuple[Op, Op]]:
    """Each collective over stages with the next one, in program order."""
    last: Op | None = None
    for op in filter(is_cross_stage, ops):
        if last is not None:
            yield last, op
        last = op
