"""Transfers between HBM and host memory: dense runs, started and awaited as collectives are.

A stack on the host is only ever an operand of these: a row of it is the source of a load or the
target of a store, at an offset that is affine in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import DynamicSliceAttrs
from shardwright.compiler.ir.ops.host import EMPTY, LOAD, STORE
from shardwright.compiler.ir.types import Op, TensorType
from shardwright.compiler.lower.collective import dense_source
from shardwright.compiler.lower.landing import is_run
from shardwright.compiler.lower.registry import register_maker
from shardwright.compiler.lower.task import ALLOC, COLLECTIVE, Window, unsupported

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body


def _empty(body: Body, op: Op) -> None:
    body.made[op.result] = Op(ALLOC, (), op.results)


def _load(body: Body, op: Op) -> None:
    stack, *starts = op.operands
    _check_run(op, stack.type, op.attrs.sizes)
    row = make_op("dynamic_slice", (stack, *starts), DynamicSliceAttrs(op.attrs.sizes), loc=op.loc)
    body.add(row)
    body.add_task(op, COLLECTIVE, (row.result,))


def _store(body: Body, op: Op) -> None:
    stack, update, *starts = op.operands
    _check_run(op, stack.type, update.type.shape)
    room = body.owned(op, stack)
    source = dense_source(body, op, update)
    at = body.starts(op, room, update.type.shape, starts)
    store = Op(STORE, (room, source), op.results, loc=op.loc)
    task = body.add_task(store, COLLECTIVE, (source,), room)
    task.fill(Window(at, update.type.shape, (1,) * stack.type.rank))


def _check_run(op: Op, stack: TensorType, sizes: tuple[int, ...]) -> None:
    """A transfer moves one run of bytes."""
    if not is_run(sizes, stack.shape):
        given = f"requires rows of a stack along its first dim, got {list(sizes)} of {stack}"
        raise unsupported(op, given, "stack what goes to the host along dim 0")


register_maker(EMPTY, _empty)
register_maker(LOAD, _load)
register_maker(STORE, _store)
