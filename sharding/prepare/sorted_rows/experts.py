"""Products of rows with the matrices of their experts, one product per expert.

A grouped product (`ragged_dot`) is written as one contraction over experts and features, of rows
that are zero but for their own expert. Summing over experts afterwards is the same, and shows the
expert as an index that picks a matrix: rows can then be sent to where it lies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright.compiler.ir.facts import chooses, pairing, stored
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ReduceAttrs
from shardwright.compiler.ir.rewrite import with_ops, with_regions
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.prepare.sorted_rows.level import Level


def experts_apart(level: Level) -> Graph:
    """The graph of `level` with a batched product and a sum for every contraction over a dim that
    selects, loops included.
    """
    ops: list[Op] = []
    for op in level.graph.ops:
        if op.regions:
            op = with_regions(op, (experts_apart(level.inside(op)),))
        pair = _selecting(level, op) if pairing(op) is not None else None
        ops += [op] if pair is None else _apart(op, pair)
    return with_ops(level.graph, ops)


def _selecting(level: Level, op: Op) -> int | None:
    """Which contracted pair of dims only selects in one operand, and does not in the other."""
    a, (lhs, rhs) = op.attrs, op.operands
    if a.lhs_batch or len(a.lhs_contract) < 2:
        return None
    for number, (i, j) in enumerate(zip(a.lhs_contract, a.rhs_contract, strict=True)):
        if _selects(level, lhs, i) != _selects(level, rhs, j):
            return number
    return None


def _selects(level: Level, value: Value, dim: int) -> bool:
    """True when `value` is the same along `dim` but for places where it is zero."""
    op = level.made.get(value)
    if op is None or not chooses(op):
        return False
    zeros = stored(level.made.get(op.operands[2]))
    empty = zeros is not None and not any(zeros.data)
    return empty and level.repeats(op.operands[1], dim) and not level.repeats(value, dim)


def _apart(op: Op, pair: int) -> list[Op]:
    """The contraction with `pair` as a batch dim, and its sum."""
    a: Any = op.attrs
    left, right = ([*dims] for dims in (a.lhs_contract, a.rhs_contract))
    batch = (left.pop(pair),), (right.pop(pair),)
    attrs = replace(
        a,
        lhs_batch=batch[0],
        rhs_batch=batch[1],
        lhs_contract=tuple(left),
        rhs_contract=tuple(right),
    )
    product = make_op("dot_general", op.operands, attrs, loc=op.loc)
    total = Op("reduce", product.results, op.results, ReduceAttrs("add", (0,)), (), op.loc)
    return [product, total]
