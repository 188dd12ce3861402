"""Carries whose first value is never read: stacks that a loop fills slice by slice.

JAX's scan starts every stack of results with zeros and writes slice `i` in iteration `i`. When the
slices cover the stack and nothing looks at it before the end, the zeros need not be stored; of a
loop that is split, those of all its parts together. Nor need what a queue starts with when every
iteration makes the entry anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.ir.traits import UPDATES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.passes.scalars import Known


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of a tensor that are written, each element once: `starts` along `dim`, which has
    `size` elements, `part` in each slice."""

    dim: int
    size: int
    part: int
    starts: frozenset[int]

    @property
    def is_whole(self) -> bool:
        """Whether they are the tensor."""
        return self.starts == set(range(0, self.size, self.part))

    def union(self, other: Slices) -> Slices | None:
        """Both; None for slices of another kind."""
        if (self.dim, self.size, self.part) != (other.dim, other.size, other.part):
            return None
        return replace(self, starts=self.starts | other.starts)


def is_read(body: Graph, carry: int) -> bool:
    """Whether an iteration reads `carry`, or leaves it to the next one."""
    before = body.inputs[carry]
    return before in body.outputs or any(before in op.operands for op in body.ops)


def written(
    body: Graph, carry: int, trip: int, register: int, known: Mapping[Value, Known]
) -> Slices | None:
    """What all iterations of a loop write to `carry`, by one write per iteration or several behind
    each other; None when anything else reads it between, or it is not such slices.

    `register` counts 0 .. `trip` - 1; `known` are the scalars of `body`.
    """
    writes = _writes(body, carry)
    return slices_of(writes, trip, register, known) if writes else None


def covering_writes(
    body: Graph, carry: int, trip: int, register: int, known: Mapping[Value, Known]
) -> list[Op]:
    """The writes of slices by which an iteration fills its share of `carry`, in order, when those
    of all iterations are the whole tensor, each element once; none otherwise. Arguments as of
    `written`.
    """
    found = written(body, carry, trip, register, known)
    return _writes(body, carry) if found is not None and found.is_whole else []


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


def slices_of(
    writes: Sequence[Op], trip: int, register: int, known: Mapping[Value, Known]
) -> Slices | None:
    """What `writes` write when they run `trip` times; arguments as of `written`."""
    stack, update = (v.type.shape for v in writes[0].operands[:2])
    if not trip or any(op.operands[1].type.shape != update for op in writes):
        return None
    found: list[Slices] = []
    for dim, (size, part) in enumerate(zip(stack, update, strict=True)):
        starts = [known.get(op.operands[2 + dim]) for op in writes]
        if size == part and all(start is not None and start.value == Affine(0) for start in starts):
            continue
        walked = _walked(starts, trip, register)
        if walked is None or any(at % part for at in walked):
            return None
        found.append(Slices(dim, size, part, walked))
    if len(found) > 1:
        return None
    return found[0] if found else Slices(0, 1, 1, frozenset((0,)))  # all of it, every time


def _walked(starts: Sequence[Known | None], trip: int, register: int) -> frozenset[int] | None:
    """Where the slices along a dim start, in any order; None when one comes twice."""
    found: list[int] = []
    for start in starts:
        if start is None or any(at != register for at, _ in start.value.terms):
            return None
        step = sum(coefficient for _, coefficient in start.value.terms)
        found += [start.value.const + step * turn for turn in range(trip)]
    return frozenset(found) if len(set(found)) == len(found) else None
