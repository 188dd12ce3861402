"""Elementwise ops, and the internal copy: operands walk one index space, dim by dim.

Predicates of select and bounds of clamp may be scalars. A copy has no node of its own: the node of
its operand is stored a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.compiler.lower.indexing_map import IndexingMap, fresh, unify_all
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


def _indexing(space: Space, task: Task) -> IndexingMap:
    """The map of the result: that of the first operand of its rank, the others united with it."""
    rank = task.result.type.rank
    indexing: IndexingMap | None = None
    for k, value in enumerate(task.data):
        if value.type.rank != rank or space.body.is_rematerialised(value):
            continue
        operand = space.operand(task, k)
        if indexing is not None and not unify_all(indexing, operand):
            space.refuse("operands walk different indices")
        indexing = operand if indexing is None else indexing
    indexing = fresh(task.result.type.shape) if indexing is None else indexing
    for k, value in enumerate(task.data):
        if space.body.is_rematerialised(value):
            space.set_operand(task, k, indexing if value.type.rank == rank else ())
        elif value.type.rank != rank:
            space.operand(task, k)
    return indexing


def _emit(emitter: Emitter, task: Task) -> int:
    inputs = [emitter.operand(task, k) for k in range(len(task.data))]
    return emitter.elementwise(task.op, inputs)


register_maker(ELEMENTWISE, as_loop)
register(ELEMENTWISE, Lowering(_indexing, _emit))
register(COPY, Lowering(_indexing, first_operand))
