"""Carries that change their memory from turn to turn of a loop, instead of being copied.

A queue of gathered weights moves on by one place per turn: its values stay where they are and the
carries take turns in owning the memory. After some turns every carry is back where it was, so the
loop repeats that many turns, each with its own buffers. `buffers.py` lays the turns out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.facts import behind
from shardwright.compiler.ir.ops.host import STORE
from shardwright.compiler.ir.types import Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.outline.cut import BITCASTS, LoopStep
from shardwright.compiler.outline.pieces import MOVERS


@dataclass(frozen=True, slots=True)
class Rotation:
    """Where carries come from: `moved` carries take the memory of another carry or invariant,
    `made` ones are written anew in memory that no carry owns at the time.
    """

    moved: Mapping[int, int]
    made: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """Buffers by carry before a turn, and where it writes those that are made anew."""

    before: Mapping[int, int]
    targets: Mapping[int, int]
    moved: Collection[int]

    def request(self, carry: int) -> int | None:
        """Where the turn must leave the next value of a carry; None when it is there already."""
        if carry in self.moved:
            return None
        return self.targets.get(carry, self.before[carry])


@dataclass(frozen=True, slots=True)
class Turns:
    """All turns of a loop: `first` ones, then `count` times `repeated`, then `last` ones.

    `after` holds the buffers of rotating carries in the end.
    """

    first: Sequence[Turn]
    repeated: Sequence[Turn]
    count: int
    last: Sequence[Turn]
    after: Mapping[int, int]


def rotation_of(step: LoopStep) -> Rotation:
    """The rotating carries of a loop; none of them when nothing is in flight beside the code.

    Besides those that move, a carry rotates when a collective reads its old value or makes its new
    one: in one place, they would have to wait for everything else that touches it.
    """
    inputs = step.op.regions[0].inputs
    number = {inputs[i]: i for i in (*step.carried, *step.invariant)}
    sent, received = _in_flight(step)
    moved = {
        i: number[step.level.outputs[i]]
        for i in step.carried
        if number.get(step.level.outputs[i], i) != i
    }
    if len(set(moved.values())) < len(moved):
        moved = {}  # two carries take over one: each needs a copy of its own
    passed_on = set(moved.values())
    made = tuple(
        i
        for i in step.carried
        if i not in moved
        and (i in passed_on or inputs[i] in sent or step.level.outputs[i] in received)
    )
    return Rotation(moved, made)


def _in_flight(step: LoopStep) -> tuple[set[Value], set[Value]]:
    """Values of a body that collectives read and make, behind bitcasts."""
    body = step.op.regions[0]
    made = body.producers()
    sent: set[Value] = set()
    received: set[Value] = set()
    for op in body.ops:
        if op.name in MOVERS:
            in_place = op.name == STORE  # a row of a stack, which stays where it is
            received.update(() if in_place else op.results)
            read = op.operands[in_place:]
            sent.update(behind(v, made, lambda op: op.name in BITCASTS) for v in read)
    return sent, received


def turns(
    rotation: Rotation, place: Mapping[int, int], spare: Mapping[int, int], trip: int
) -> Turns:
    """The turns of a loop of `trip` iterations.

    `place` holds the buffers of rotating carries and of invariants they take over, `spare` a free
    buffer for every carry that is made anew.
    """
    now, free = dict(place), dict(spare)
    found: list[Turn] = []
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    start = trip
    while len(found) < trip:
        state = (*sorted(now.items()), *sorted(free.items()))
        if state in seen:
            start = seen[state]
            break
        seen[state] = len(found)
        found.append(Turn(dict(now), dict(free), rotation.moved))
        now, free = _turned(rotation, now, free)
    period = len(found) - start
    if period <= 0:
        return Turns(found, (), 0, (), now)
    count, rest = divmod(trip - start, period)
    after = found[start + rest].before
    return Turns(found[:start], found[start:], count, found[start : start + rest], after)


def _turned(
    rotation: Rotation, now: Mapping[int, int], free: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Places and free buffers after a turn: what falls out of a queue is free for what enters."""
    after = dict(now)
    after.update((i, now[source]) for i, source in rotation.moved.items())
    after.update(free)
    left = dict(free)
    owned = set(after.values())
    for carry in rotation.made:
        end = _end_of_queue(rotation, carry)
        if now[end] not in owned:
            left[carry] = now[end]
    return after, left


def _end_of_queue(rotation: Rotation, carry: int) -> int:
    """The last carry that a value made for `carry` passes through."""
    follower = {source: i for i, source in rotation.moved.items() if source != i}
    end = carry
    while end in follower:
        end = follower[end]
        if end == carry:
            break
    return end


def substituted(value: Affine, registers: Mapping[int, Affine]) -> Affine:
    """`value` with registers replaced."""
    out = Affine(value.const)
    for register, coefficient in value.terms:
        term = registers.get(register, Affine(0, ((register, 1),)))
        out = out + term * coefficient
    return out
