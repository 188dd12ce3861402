"""Carries whose first value is never read: stacks that a loop fills slice by slice.

JAX's scan starts every stack of results with zeros and writes slice `i` in iteration `i`. When the
slices cover the stack and nothing looks at it before the end, the zeros need not be stored. Nor
need what a queue starts with when every iteration makes the entry anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.types import Graph, Op, Value
from compiler.isa.region import Affine
from compiler.lower.scalars import Known


def is_overwritten(
    body: Graph, carry: int, trip: int, register: int, known: Mapping[Value, Known]
) -> bool:
    """Whether no iteration of a loop reads the first value of `carry`, and nothing of it is left:
    each element is written, once.

    `register` counts 0 .. `trip` - 1; `known` are the scalars of `body`.
    """
    before, after = body.inputs[carry], body.outputs[carry]
    readers = [op for op in body.ops if before in op.operands or after in op.operands]
    if before not in body.outputs and not any(before in op.operands for op in body.ops):
        return trip > 0
    if len(readers) != 1 or readers[0].name != "dynamic_update_slice":
        return False
    write = readers[0]
    alone = write.operands.count(before) == 1 and body.outputs.count(after) == 1
    if not alone or write.operands[0] is not before or write.result is not after:
        return False
    return before not in body.outputs and _covers(write, trip, register, known)


def _covers(write: Op, trip: int, register: int, known: Mapping[Value, Known]) -> bool:
    """Whether the slices written in all iterations are the whole tensor."""
    stack, update, *starts = write.operands
    walked = [
        _is_walked(size, part, known.get(start), trip, register)
        for size, part, start in zip(stack.type.shape, update.type.shape, starts, strict=True)
        if not _is_whole(size, part, known.get(start))
    ]
    return walked == [True] or (not walked and trip > 0)


def _is_whole(size: int, part: int, start: Known | None) -> bool:
    return size == part and start is not None and start.value == Affine(0)


def _is_walked(size: int, part: int, start: Known | None, trip: int, register: int) -> bool:
    """Whether a dim is walked slice after slice, upwards or downwards."""
    if start is None or size != part * trip:
        return False
    upwards = Affine(0, ((register, part),))
    downwards = Affine(size - part, ((register, -part),))
    return start.value in (upwards, downwards)
