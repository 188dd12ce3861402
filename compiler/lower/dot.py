"""`dot_general`: a kernel of two loads, one contract node and at most a conversion of the result.

Operands are loaded through whatever strides they have, so no transpose is ever stored for a
contraction. Batch, row, column and summed dims keep their iter dims; tile generation merges them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.compiler.ir.types import Op
from shardwright.compiler.lower.indexing_map import IndexingMap, all_leaves, leaves, unify
from shardwright.compiler.lower.registry import Lowering, register, register_maker
from shardwright.compiler.lower.task import CONTRACT, ClashError, NeedsCopyError, Task, unsupported

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body
    from shardwright.compiler.lower.emit import Emitter
    from shardwright.compiler.lower.space import Space


def _make(body: Body, op: Op) -> None:
    if not op.result.type.dtype.is_float:
        hint = "let the dot make f32 and convert that"
        raise unsupported(op, f"of floats requires a float result, got {op.result.type}", hint)
    body.add_task(op, CONTRACT, tuple(body.stored(v, op) for v in op.operands))


def _indexing(space: Space, task: Task) -> IndexingMap:
    attrs = task.op.attrs
    lhs, rhs = space.operand(task, 0), space.operand(task, 1)
    left, right = attrs.lhs_batch + attrs.lhs_contract, attrs.rhs_batch + attrs.rhs_contract
    pairs = zip(left, right, strict=True)
    if not all(unify(lhs[a], rhs[b]) for a, b in pairs):
        space.refuse("contracted dims walk different indices")
    lhs_free, rhs_free = attrs.free_dims(len(lhs), len(rhs))
    return tuple(lhs[d] for d in attrs.lhs_batch + lhs_free) + tuple(rhs[d] for d in rhs_free)


def _emit(emitter: Emitter, task: Task) -> int:
    indexing = emitter.space.operand(task, 0)
    over = [a for d in task.op.attrs.lhs_contract for a in leaves(indexing[d])]
    operands = [emitter.operand(task, 0), emitter.operand(task, 1)]
    spanned = emitter.iter_dims_of(operands[0]) | emitter.iter_dims_of(operands[1])
    for k in range(2):
        missing = set(all_leaves(emitter.space.operand(task, k))) - spanned
        if missing:
            operands[k] = _everywhere(emitter, task, k, summed=missing <= set(over))
            spanned |= emitter.iter_dims_of(operands[k])
    attrs = {"over": emitter.numbers(over)}
    return emitter.node("contract", operands, spanned - set(over), task.result.type.dtype, attrs)


def _everywhere(emitter: Emitter, task: Task, k: int, summed: bool) -> int:
    """A load of operand `k` where neither operand moves along one of its dims: it spans all of
    them, and has to be in memory for that; dense, unless the dim is summed, because a result is
    stored at the points of its operands.
    """
    value = task.data[k]
    if emitter.space.is_inside(value):
        raise ClashError(emitter.body.producer[emitter.body.base(value)].number, task.number)
    if not summed:
        raise NeedsCopyError(value)
    return emitter.load(value, emitter.space.operand(task, k), everywhere=True)


register_maker("dot_general", _make)
register("dot_general", Lowering(_indexing, _emit))
