"""Ops whose values all have the same dims: axes pass through where dims walk together
(`indices/dims.py`), and a dim that ends at the op is whole on every core.

Slicing, padding, joining, sorting or moving windows along a sharded dim would need elements of
other cores and is refused. Scalar operands (predicates, bounds, starts) have no dims. The user's
sharding constraints have done their work in partitioning and disappear here.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.indices.dims import factors
from shardwright.sharding.localize.context import (
    Localizer,
    Rule,
    localizes,
    require_dims,
    require_whole,
)


def _regular(what: str = "operand and result", why: str = "") -> Rule:
    """The rule that keeps an op as it is. `what` must be sharded alike; dims that no index of the
    op walks along must be whole, which `why` says in a refusal.
    """

    def rule(context: Localizer, op: Op) -> Sequence[Value]:
        first, *others = [v for v in (*op.operands, *op.results) if v.type.rank == _rank(op)]
        dims = context.dims(first)
        for value in others:
            require_dims(context, op, what, dims, context.dims(value))
        if why and any(dims):
            tied = {dim for factor in factors(op) for dim in factor}
            ends = (d for v in (first, *others) for d in range(len(dims)) if (v, d) not in tied)
            for dim in ends:
                require_whole(context, op, dim, dims[dim], why)
        return context.keep(op)

    return rule


def _rank(op: Op) -> int:
    return op.results[0].type.rank


_replaced = _regular(why="a part of it is replaced")
_elementwise = (n for n, op in OPS.items() if op.elementwise and op.kind is not Kind.IDENTITY)
localizes(*_elementwise)(_regular("operands and result"))
localizes("move_to")(_regular())
localizes("slice", "dynamic_slice")(_regular(why="it takes a part"))
localizes("concatenate")(_regular("operands and result", "operands follow each other"))
localizes("pad")(_regular(why="it is padded"))
localizes("reverse")(_regular(why="it is reversed"))
localizes("reduce_window", "select_and_scatter")(
    _regular("operands and result", "windows slide along it")
)
localizes("sort")(_regular("operands and results", "it is sorted"))


@localizes("dynamic_update_slice")
def _update(context: Localizer, op: Op) -> Sequence[Value]:
    operand, update = map(context.dims, op.operands[:2])
    require_dims(context, op, "operand and update", operand, update)
    return _replaced(context, op)


@localizes("sharding_constraint")
def _constraint(context: Localizer, op: Op) -> Sequence[Value]:
    require_dims(
        context, op, "operand and result", context.dims(op.operand), context.dims(op.result)
    )
    return context.operands(op)
