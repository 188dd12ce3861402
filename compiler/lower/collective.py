"""Collectives: whole tensors in, whole tensors out, started and awaited by kernels of their own.

Source and target are dense tensors of the function; the table of calls keeps mesh axes symbolic, so
the code is the same on every core. Groups of one rank move nothing and become views.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardwright.compiler.ir.facts import keeps_order, resized_dim
from shardwright.compiler.ir.ops import AllToAllAttrs
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.lower.registry import register_maker
from shardwright.compiler.lower.task import COLLECTIVE, Task, unsupported

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body

REDUCTIONS = ("add", "max", "min")


def _make(body: Body, op: Op) -> None:
    source = op.operands[0]
    if op.attrs.group_size == 1:
        identity = Op("optimization_barrier", (source,), op.results, loc=op.loc)
        body.look_through(op.result, source, identity)
        return
    _check_reduction(op)
    body.add_task(op, COLLECTIVE, (dense_source(body, op, source),))


def dense_source(body: Body, op: Op, source: Value) -> Value:
    """`source`, or a copy of it, in one run of memory; `op` sends it."""
    base, chain = body.path(source)
    one_run = all(_is_one_run(body, view) for view in chain)
    if not one_run or body.is_rematerialised(source) or base in body.constants:
        return body.copy(source, op)
    return source


def _is_one_run(body: Body, view: Value) -> bool:
    """Whether a view of what lies in one run does too."""
    if view in body.windows:
        return body.windows[view].is_run_of(body.views[view].operand.type.shape)
    return body.views[view].name in IDENTITIES or keeps_order(body.views[view])


def _check_reduction(op: Op) -> None:
    """Refuse what the collective engine cannot reduce."""
    reduction = getattr(op.attrs, "reduction", "")
    if not reduction:
        return
    if reduction not in REDUCTIONS:
        raise unsupported(
            op, f"requires a reduction of add max min, got {reduction}", "reduce by add"
        )
    if not op.result.type.dtype.is_float:
        given = f"requires float elements to reduce, got {op.result.type.dtype.value}"
        raise unsupported(op, given, "cast to f32 before reducing")


def call_of(task: Task, number: int) -> CollectiveCall:
    """The entry of a task in the function's table of collectives; a transfer to or from the host is
    one of a rank alone.
    """
    op, shape = task.op, task.data[0].type.shape
    dim = _moving_dim(op)
    if dim < 0:
        placed = (1, math.prod(shape), 1)
    else:
        placed = (math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
    reduction = getattr(op.attrs, "reduction", "")
    name = f"{op.name}.{number}"
    return CollectiveCall(
        op.name,
        getattr(op.attrs, "axes", ()),
        op.result.type.dtype,
        placed,
        reduction,
        name=name,
        pairs=getattr(op.attrs, "pairs", ()),
        parts=getattr(op.attrs, "parts", ()),
    )


def _moving_dim(op: Op) -> int:
    """The gathered or scattered dim, -1 for what keeps its shape."""
    if isinstance(op.attrs, AllToAllAttrs):
        assert op.attrs.split_dim == op.attrs.concat_dim, "others are rewritten (canonical.py)"
        return op.attrs.split_dim
    dim = resized_dim(op)
    return -1 if dim is None else dim


for _name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"):
    register_maker(_name, _make)
