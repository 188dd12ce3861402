"""`reduce`: the reduced dims leave the indexing map.

A value that was only broadcast along a reduced dim does not span it, so that sums and products
count it explicitly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.compiler.lower.indexing_map import IndexingMap, extent, leaves
from shardwright.compiler.lower.registry import Lowering, as_loop, register, register_maker
from shardwright.compiler.lower.task import Task

if TYPE_CHECKING:
    from shardwright.compiler.lower.emit import Emitter
    from shardwright.compiler.lower.space import Space


def _indexing(space: Space, task: Task) -> IndexingMap:
    indexing = space.operand(task, 0)
    return tuple(expr for d, expr in enumerate(indexing) if d not in task.op.attrs.dims)


def _emit(emitter: Emitter, task: Task) -> int:
    source = emitter.operand(task, 0)
    indexing = emitter.space.operand(task, 0)
    attrs, dtype = task.op.attrs, task.result.type.dtype
    over = [a for d in attrs.dims for a in leaves(indexing[d])]
    spanned = emitter.iter_dims_of(source)
    inside = [a for a in over if a in spanned]
    if inside:
        numbers = {"kind": attrs.kind, "over": emitter.numbers(inside)}
        source = emitter.node("reduce", (source,), spanned - set(inside), dtype, numbers)
    repeats = extent(a for a in over if a not in spanned)
    if repeats == 1 or attrs.kind not in ("add", "multiply"):
        return source
    name = "multiply" if attrs.kind == "add" else "power"
    return emitter.pointwise(name, (source, emitter.constant(repeats, dtype)), dtype)


register_maker("reduce", as_loop)
register("reduce", Lowering(_indexing, _emit))
