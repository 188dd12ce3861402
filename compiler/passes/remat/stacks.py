"""Stacks: carries that a loop writes row by row with its counter, and the loops that read the rows
back.

A stack whose every row is written holds, in row `i`, what iteration `i` made. A reader that slices
row `j` therefore wants a value of iteration `j`, and whatever else it needs of that iteration can
be had from other stacks at the same row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.facts import behind, keeps_order, places_of, takes_at
from shardwright.compiler.ir.traits import UPDATES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.scalars import Known, known_scalars, parameter


@dataclass(frozen=True, slots=True)
class Stack:
    """Carry `carry` of a loop, filled along `dim`; `value` is what an iteration writes, without
    dims of size one.
    """

    carry: int
    dim: int
    value: Value


@dataclass(frozen=True, slots=True)
class RowRead:
    """`op` slices one row of carry `carry` of `loop`; `row` is the start along the stacked dim."""

    loop: Op
    carry: int
    op: Op
    row: Value


def stacks(loop: Op) -> list[Stack]:
    """The carries of `loop` whose rows are all written, in the order of the values' ops."""
    body = loop.regions[0]
    known, counter = counted(loop), parameter(0, 0, loop.attrs.trip - 1)
    producers = body.producers()
    uses = body.uses()
    position = {v: i for i, op in enumerate(body.ops) for v in op.results}
    found = []
    for carry, (before, after) in enumerate(zip(body.inputs, body.outputs, strict=True)):
        op = producers.get(after)
        if op is None or op.name not in UPDATES or op.operands[0] is not before:
            continue
        if uses[before] != [op] or after in uses or body.outputs.count(after) > 1:
            continue
        window, starts = op.operands[1].type.shape, places_of(op)
        dim = row_dim(before.type.shape, window, [known.get(v) for v in starts])
        if dim is None or known[starts[dim]] != counter:
            continue
        if before.type.shape[dim] == loop.attrs.trip:
            found.append(Stack(carry, dim, behind(op.operands[1], producers, _adds_units)))
    return sorted(found, key=lambda s: position.get(s.value, -1))


def counted(loop: Op) -> dict[Value, Known]:
    """The scalars of the body of `loop` that are affine in its counter, which is register 0."""
    body = loop.regions[0]
    counter = body.inputs[loop.attrs.induction]
    return known_scalars(body, {counter: parameter(0, 0, max(0, loop.attrs.trip - 1))})


def row_dim(
    shape: Sequence[int], window: Sequence[int], starts: Sequence[Known | None]
) -> int | None:
    """The one dim along which `window` is a row of `shape` at a known start that never clamps; the
    others are whole.
    """
    rows = [d for d, (n, w) in enumerate(zip(shape, window, strict=True)) if n != w]
    if len(rows) > 1 or (not rows and 1 not in shape):
        return None
    dim = rows[0] if rows else list(shape).index(1)
    start = starts[dim]
    if window[dim] != 1 or start is None or not 0 <= start.low <= start.high < shape[dim]:
        return None
    return dim


def _adds_units(op: Op) -> bool:
    """True for an op that only adds dims of size one, or drops them."""
    before, after = op.operands[:1], op.results[:1]
    units = [[n for v in values for n in v.type.shape if n != 1] for values in (before, after)]
    return keeps_order(op) and units[0] == units[1]


def row_reads(graph: Graph, value: Value, dim: int) -> list[RowRead] | None:
    """Every read of the stack `value`, when all of them slice rows inside of loops; else None."""
    if value in graph.outputs:
        return None
    reads: list[RowRead] = []
    for loop in graph.uses().get(value, ()):
        found = _reads_in(loop, value, dim) if loop.regions else None
        if found is None:
            return None
        reads += found
    return reads


def _reads_in(loop: Op, value: Value, dim: int) -> list[RowRead] | None:
    """Row reads of an invariant carry, None when the body does something else with it."""
    body = loop.regions[0]
    known = counted(loop)
    uses = body.uses()
    reads: list[RowRead] = []
    for carry, operand in enumerate(loop.operands):
        if operand is not value:
            continue
        inner = body.inputs[carry]
        if carry not in invariant_carries(loop):
            return None
        for op in uses.get(inner, ()):
            if not takes_at(op) or inner in places_of(op):
                return None
            starts = [known.get(v) for v in places_of(op)]
            if row_dim(inner.type.shape, op.result.type.shape, starts) != dim:
                return None
            reads.append(RowRead(loop, carry, op, places_of(op)[dim]))
    return reads
