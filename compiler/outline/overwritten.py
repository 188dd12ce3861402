"""Carries whose first value is never read: stacks that a loop fills slice by slice.

JAX's scan starts every stack of results with zeros and writes slice `i` in iteration `i`. When the
slices cover the stack and nothing looks at it before the end, the zeros need not be stored. Nor
need what a queue starts with when every iteration makes the entry anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.compiler.ir.traits import UPDATES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.isa.region import Affine
from shardwright.compiler.lower.scalars import Known


def is_overwritten(
    body: Graph, carry: int, trip: int, register: int, known: Mapping[Value, Known]
) -> bool:
    """Whether no iteration of a loop reads the first value of `carry`, and nothing of it is left:
    each element is written, once, by one write per iteration or several behind each other.

    `register` counts 0 .. `trip` - 1; `known` are the scalars of `body`.
    """
    before = body.inputs[carry]
    if before not in body.outputs and not any(before in op.operands for op in body.ops):
        return trip > 0
    return bool(covering_writes(body, carry, trip, register, known))


def covering_writes(
    body: Graph, carry: int, trip: int, register: int, known: Mapping[Value, Known]
) -> list[Op]:
    """The writes of slices by which an iteration fills its share of `carry`, in order, when those
    of all iterations are the whole tensor, each element once; none otherwise. Arguments as of
    `is_overwritten`.
    """
    writes = _writes(body, carry)
    return writes if writes and _covers(writes, trip, register, known) else []


def _writes(body: Graph, carry: int) -> list[Op]:
    """The writes of slices that make the next value of `carry` of the one before, in order; none
    when anything else reads a value between.
    """
    value, after = body.inputs[carry], body.outputs[carry]
    found: list[Op] = []
    for op in body.ops:
        if value not in op.operands:
            continue
        writes = op.name in UPDATES and op.operands[0] is value
        if not writes or op.operands.count(value) > 1 or value in body.outputs:
            return []
        value = op.result
        found.append(op)
    return found if value is after and body.outputs.count(after) == 1 else []


def _covers(writes: Sequence[Op], trip: int, register: int, known: Mapping[Value, Known]) -> bool:
    """Whether the slices written in all iterations are the whole tensor."""
    stack, update = (v.type.shape for v in writes[0].operands[:2])
    if any(op.operands[1].type.shape != update for op in writes):
        return False
    walked = []
    for dim, (size, part) in enumerate(zip(stack, update, strict=True)):
        starts = [known.get(op.operands[2 + dim]) for op in writes]
        if size != part or any(start is None or start.value != Affine(0) for start in starts):
            walked.append(_is_walked(size, part, starts, trip, register))
    return walked == [True] or (not walked and trip > 0)


def _is_walked(
    size: int, part: int, starts: Sequence[Known | None], trip: int, register: int
) -> bool:
    """Whether a dim is walked slice after slice, in any order."""
    if size != part * trip * len(starts):
        return False
    found: set[int] = set()
    for start in starts:
        if start is None or any(at != register for at, _ in start.value.terms):
            return False
        step = sum(coefficient for _, coefficient in start.value.terms)
        found.update(start.value.const + step * turn for turn in range(trip))
    return found == set(range(0, size, part))
