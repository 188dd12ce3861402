"""Ops that assemble a tensor from parts: each part is written into its range of the result's
memory.

An update of a tensor that nothing reads afterwards happens in place. The write itself is
elementwise in its update, so that it joins the kernel that computes the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import BroadcastInDimAttrs, SliceAttrs
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.lower.indexing_map import IndexingMap
from shardwright.compiler.lower.registry import Lowering, first_operand, register, register_maker
from shardwright.compiler.lower.task import WRITE, Task, Window

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body
    from shardwright.compiler.lower.space import Space


def _update_slice(body: Body, op: Op) -> None:
    target, update, *starts = op.operands
    memory = body.owned(op, target)
    at = body.starts(op, target, update.type.shape, starts)
    window = Window(at, update.type.shape, (1,) * target.type.rank)
    if not body.land(memory, update, window, op.result):
        body.write(memory, update, window, op, op.result)


def _concatenate(body: Body, op: Op) -> None:
    dim, rank, at = op.attrs.dim, op.result.type.rank, 0
    memory = body.allocate(op.result)
    operands = [v for v in op.operands if v.type.num_elements]
    for number, operand in enumerate(operands):
        starts = tuple(Affine(at if d == dim else 0) for d in range(rank))
        result = op.result if number == len(operands) - 1 else None
        window = Window(starts, operand.type.shape, (1,) * rank)
        memory = body.write(memory, operand, window, op, result)
        at += operand.type.shape[dim]


def _pad(body: Body, op: Op) -> None:
    """The padding value everywhere, then the kept elements at their places."""
    operand, value = op.operands
    shape, steps = op.result.type.shape, tuple(i + 1 for i in op.attrs.interior)
    spread = make_op("broadcast_in_dim", (value,), BroadcastInDimAttrs((), shape), loc=op.loc)
    body.add(spread)
    memory = body.copy(spread.result, op)
    first = tuple(max(0, -(low // s)) for low, s in zip(op.attrs.low, steps, strict=True))
    at = [low + f * s for low, f, s in zip(op.attrs.low, first, steps, strict=True)]
    room = [-(-(n - a) // s) for n, a, s in zip(shape, at, steps, strict=True)]
    limit = tuple(min(n, f + r) for n, f, r in zip(operand.type.shape, first, room, strict=True))
    if any(stop <= start for stop, start in zip(limit, first, strict=True)):
        body.look_through(op.result, memory, Op("optimization_barrier", (memory,), (op.result,)))
        return
    kept = _sliced(body, operand, first, limit, op)
    window = Window(tuple(Affine(a) for a in at), kept.type.shape, steps)
    body.write(memory, kept, window, op, op.result)


def _sliced(
    body: Body, operand: Value, start: tuple[int, ...], limit: tuple[int, ...], op: Op
) -> Value:
    """The range start:limit of `operand`, itself when that is all of it."""
    if not any(start) and limit == operand.type.shape:
        return operand
    attrs = SliceAttrs(start, limit, (1,) * len(start))
    cut = make_op("slice", (operand,), attrs, loc=op.loc)
    body.add(cut)
    return cut.result


def _write_indexing(space: Space, task: Task) -> IndexingMap:
    return space.operand(task, 0)


register_maker("dynamic_update_slice", _update_slice)
register_maker("concatenate", _concatenate)
register_maker("pad", _pad)
register(WRITE, Lowering(_write_indexing, first_operand))
