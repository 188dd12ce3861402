"""What an algorithm is: steps in which members of a lane send blocks along permutations, and when
it may run.

A lane is an order of ranks that an algorithm runs over; algorithms know its members by number only.
The moves of a schedule (`tiers.py`) and the loads that times follow from (`timing/loads.py`) are
both derived from the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.groups.layout import Layout, Orders
from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.schedule import Charge
from shardwright.collectives.topology import IntArray

Moves = tuple[IntArray, IntArray, IntArray]  # source, target, owner of the chunk; one step's


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """`times` steps in a row in which member `source[i]` sends the chunks of the owners `blocks[i]`
    to `target[way, i]`, for every way. In a later step it sends what the step before brought it,
    which takes one way that permutes the sources.

    Shapes: `source` [sends], ascending; `target` [ways, sends], each way to different members;
    `blocks` [sends, width].
    """

    source: IntArray
    target: IntArray
    blocks: IntArray
    times: int = 1
    charge: Charge = Charge.MOVE
    name: str = ""

    def moves(self) -> list[Moves]:
        """What moves in each of the steps, one way after the other."""
        shape = (*self.target.shape, self.blocks.shape[1])
        source = np.broadcast_to(self.source[:, None], shape).ravel()
        target = np.broadcast_to(self.target[:, :, None], shape).ravel()
        before, blocks, found = np.argsort(self.target[:1].ravel()), self.blocks, []
        for _ in range(self.times):
            found.append((source, target, np.broadcast_to(blocks, shape).ravel()))
            blocks = blocks[before]
        return found


Rule = Callable[[int], Sequence[Steps]]  # the steps among so many members


@dataclass(frozen=True, slots=True)
class Asked:
    """What an algorithm is chosen for; `size_bytes` of the larger of source and target of a
    rank."""

    kind: CollectiveKind
    layout: Layout
    size_bytes: int
    costs: CollectiveCosts


Reason = Callable[[Asked], str]  # why an algorithm may run; empty when it may not


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A row of the table (`table.py`): steps among the members of a lane, or the algorithms along
    the `sides` of a grid of ranks.

    `gather` leaves all members with the chunks of all. `scatter` leaves every member with the sum
    of its chunk; unless given, it is the gather run backwards with the members in opposite order,
    which takes the same edges. An all_reduce is both.
    `cycles`: inside an instance it runs over every cycle of the chips at once, one part of every
    chunk each. `orders`: it takes a group as a whole, in these orders, whatever instances that
    spans.
    `inside`: why it may run inside of an instance; the last such row does. `across`: whether it may
    run across instances, where loads are those of the first: all members have to send alike.
    `whole`: why it may run over a whole group instead of both.
    """

    name: str
    gather: Rule = lambda members: ()
    scatter: Rule | None = None
    sides: tuple[Algorithm, ...] = ()
    cycles: bool = False
    orders: Callable[[Layout, int], Orders] | None = None
    inside: Reason = lambda asked: ""
    across: Callable[[Asked], bool] = lambda asked: False
    whole: Reason = lambda asked: ""

    @property
    def along(self) -> tuple[Algorithm, ...]:
        """What runs along each side: itself, unless it is made of others."""
        return self.sides or (self,)

    def steps(self, members: int) -> dict[bool, Sequence[Steps]]:
        """Steps of the half that reduces (scatters) and of the other one, in their order. Of a
        scatter that follows from the gather they say who sends to whom, how much and how often."""
        gather = tuple(self.gather(members))
        scatter = gather[::-1] if self.scatter is None else self.scatter(members)
        return {True: scatter, False: gather}

    def moves(self, members: int, *, reduces: bool) -> list[tuple[Steps, list[Moves]]]:
        """The moves of the half that reduces, or of the other one.

        Raises CollectiveError when a scatter would take other edges than the gather it follows
        from.
        """
        found = [(steps, steps.moves()) for steps in self.steps(members)[reduces]]
        if not reduces or self.scatter is not None:
            return found
        return [(steps, self._backwards(moves, members)) for steps, moves in found]

    def _backwards(self, moves: list[Moves], members: int) -> list[Moves]:
        last = members - 1
        turned = [(last - t, last - s, last - o) for s, t, o in reversed(moves)]
        for (source, target, _), (new_source, new_target, _) in zip(moves, turned, strict=True):
            edges, others = source * members + target, new_source * members + new_target
            if not np.array_equal(np.sort(edges), np.sort(others)):
                raise CollectiveError(
                    f"{self.name} requires a scatter of its own: backwards and in opposite order,"
                    f" its gather over {members} members takes other edges"
                )
        return turned
