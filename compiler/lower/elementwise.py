"""Elementwise ops, and the internal copy: operands walk one index space, dim by dim.

Predicates of select and bounds of clamp may be scalars. A copy has no node of its own: the node of
its operand is stored a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.compiler.lower.labels import Labels, fresh, unify_all
from shardwright.compiler.lower.registry import (
    ELEMENTWISE,
    Lowering,
    as_loop,
    first_operand,
    register,
    register_maker,
)
from shardwright.compiler.lower.task import COPY, Task

if TYPE_CHECKING:
    from shardwright.compiler.lower.emit import Emitter
    from shardwright.compiler.lower.space import Space


def _label(space: Space, task: Task) -> Labels:
    """Labels of the result: those of the first operand of its rank, the others united with them."""
    rank = task.result.type.rank
    labels: Labels | None = None
    for k, value in enumerate(task.data):
        if value.type.rank != rank or space.body.is_free(value):
            continue
        operand = space.operand(task, k)
        if labels is not None and not unify_all(labels, operand):
            space.refuse("operands walk different indices")
        labels = operand if labels is None else labels
    labels = fresh(task.result.type.shape) if labels is None else labels
    for k, value in enumerate(task.data):
        if space.body.is_free(value):
            space.set_operand(task, k, labels if value.type.rank == rank else ())
        elif value.type.rank != rank:
            space.operand(task, k)
    return labels


def _emit(emitter: Emitter, task: Task) -> int:
    inputs = [emitter.operand(task, k) for k in range(len(task.data))]
    return emitter.elementwise(task.op, inputs)


register_maker(ELEMENTWISE, as_loop)
register(ELEMENTWISE, Lowering(_label, _emit))
register(COPY, Lowering(_label, first_operand))
