"""In which sweep every value of a row tile is made, and what must then be kept whole.

A value that reads a reduction or a transposed operand belongs to a later level than what it reads;
values of one level and one inner atom share a sweep. What another sweep reads again is a strip.
Where a row is streamed, one segment of an atom at a time, sweeps lie in passes over its segments.
Next: `plan.py` chooses between plans, `again.py` makes values again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shardwright.compiler.codegen.domain import CODELESS, SINKS, Numbers, Space
from shardwright.compiler.codegen.rows.online import Running, merged
from shardwright.compiler.codegen.rows.roles import Roles, inner_of


@dataclass(frozen=True, slots=True)
class Stage:
    """Work on one row tile: a sweep over `inner`, or single columns when it is None."""

    level: int
    inner: int | None
    values: Numbers


@dataclass(frozen=True, slots=True)
class Pass:
    """Stages that run together, once per segment if `streamed`, with `running` columns."""

    streamed: bool
    stages: tuple[Stage, ...]
    running: tuple[Running, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeping:
    """How the sweeps of a plan are laid out.

    `whole` operands are loaded for all rows and belong to no sweep. Values in `apart` wait for a
    sweep of their own, `vectors` are made in sweeps although they do not span the rows, `again` are
    made where they are read. With `early`, loads for another sweep come before the first one, so
    that what is made from them and that sweep's values need not be kept. Of the `streamed` atom
    (-1: none) only a segment is on chip at a time; passes over it are `online` where they can be.
    """

    whole: frozenset[int]
    apart: frozenset[int] = frozenset()
    vectors: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    early: bool = False
    streamed: int = -1
    online: bool = False


def _sources(space: Space) -> set[int]:
    """Values that are made from loads and constants alone."""
    found: set[int] = set()
    for n, value in enumerate(space.values):
        if value.op not in ("reduce", "contract", *SINKS) and found.issuperset(value.inputs):
            found.add(n)
    return found


class Levels:
    """The level of the stage every row value and sum is made in (`run`)."""

    def __init__(self, space: Space, roles: Roles, sweeping: Sweeping) -> None:
        self.space, self.roles, self.sweeping = space, roles, sweeping
        self.run: dict[int, int] = {}
        self.sources = _sources(space)
        self.numbers = self._needed()
        for n in self.numbers:
            read = [i for i in space[n].inputs if i in self.run and not self._is_whole(n, i)]
            first = -1 if sweeping.early and n in self.sources else 0
            self.run[n] = max([first, *(self._earliest(n, i) for i in read)])
        self._delay()
        self.passes = self._in_passes()
        self.running: tuple[Running, ...] = ()
        if sweeping.online:
            self.passes, self.running = merged(self, self.passes)

    def _needed(self) -> list[int]:
        """Rows and sums, without what only operands that are loaded whole need."""
        mine = {*self.roles.rows, *self.roles.sums, *self.sweeping.vectors}
        wanted = {n for n in mine if n in self.roles.sums or self.space[n].op in SINKS}
        for n in sorted(mine, reverse=True):
            if n in wanted:
                wanted.update(i for i in self.space[n].inputs if not self._is_whole(n, i))
        return sorted(wanted & mine)

    def _is_whole(self, n: int, i: int) -> bool:
        return n in self.roles.panels and i in self.sweeping.whole

    def inner(self, number: int) -> int | None:
        """The inner atom a value spans."""
        return inner_of(self.roles, self.space[number])

    def home(self, number: int) -> int | None:
        """The inner atom of the sweep a value is made in."""
        value = self.space[number]
        if number in self.roles.sums:
            return self.driver(number)
        if value.op == "reduce":
            return self.inner(value.inputs[0])
        return self.inner(number)

    def driver(self, number: int) -> int | None:
        """The inner atom a sum is swept along: that of the operand that is ready last."""
        inputs = [i for i in self.space[number].inputs if self.inner(i) is not None]
        if not inputs:
            return None
        size = self.space.sizes
        return self.inner(max(inputs, key=lambda i: (self.run[i], size[self.inner(i) or 0])))

    def _earliest(self, n: int, i: int) -> int:
        """First level at which `n` can read `i`."""
        level = self.run[i] + (self.space[i].op == "reduce" or self.is_carried(i))
        inner = self.inner(i)
        in_step = inner is None or (inner == self.home(n) and n not in self.roles.panels)
        return level if in_step and not self._waits(n, i) else level + 1

    def _waits(self, n: int, i: int) -> bool:
        """Whether `n` is read transposed and made from `i` alone, which costs one more strip."""
        if n not in self.sweeping.apart or i in self.sources or i in self.roles.panels:
            return False
        return [m for m in self.space[n].inputs if self.inner(m) is not None] == [i]

    def _delay(self) -> None:
        """Values made from loads alone, or made again, move to the stage that reads them first."""
        again = self.sweeping.again
        early = [n for n in self.numbers if n in again or n in self.sources]
        users = self.space.users(self.numbers)
        for n in reversed(early):
            readers = [u for u in users.get(n, ()) if not self._is_whole(u, n)]
            if readers and not any(u in self.roles.panels for u in readers):
                step = {u: self._earliest(u, n) - self.run[n] for u in readers}
                self.run[n] = min(self.run[u] - step[u] for u in readers)

    def is_carried(self, number: int) -> bool:
        """Whether a row value adds up the streamed atom: it is carried from segment to segment."""
        return self.sweeping.streamed in self.space[number].over and number not in self.roles.sums

    def _is_streamed(self, number: int) -> bool:
        """Whether a value needs the streamed atom on chip, segment by segment."""
        value, atom = self.space[number], self.sweeping.streamed
        read = value.inputs if number in self.roles.sums else ()
        return atom in value.atoms | value.over or any(self.inner(i) == atom for i in read)

    def _in_passes(self) -> dict[int, int]:
        """The pass of every value: odd ones go over the segments, others follow from them."""
        found: dict[int, int] = {}
        for n in self.numbers:
            read = [i for i in self.space[n].inputs if i in self.run]
            first = max((found[i] + self.is_carried(i) for i in read), default=0)
            found[n] = first + (first % 2 != self._is_streamed(n))
        users = self.space.users(self.numbers)
        for n in reversed(self.numbers):
            if self._is_streamed(n) and n in users and not self.is_carried(n):
                found[n] = min(found[u] for u in users[n])
        return found

    def in_passes(self) -> tuple[Pass, ...]:
        """The stages of every pass in order."""
        found = (
            Pass(
                at % 2 == 1,
                self._stages([n for n in self.run if self.passes[n] == at]),
                tuple(r for r in self.running if self.passes[r.column] == at),
            )
            for at in sorted(set(self.passes.values()))
        )
        return tuple(one for one in found if one.stages)

    def stages(self) -> tuple[Stage, ...]:
        """All stages, pass by pass."""
        return tuple(s for one in self.in_passes() for s in one.stages)

    def _stages(self, numbers: Collection[int]) -> tuple[Stage, ...]:
        """Levels in order; within one, single columns first, as sweeps of the level read them."""
        found: dict[tuple[int, int], list[int]] = {}
        for n in sorted(numbers):
            home = self.home(n)
            found.setdefault((self.run[n], -1 if home is None else home), []).append(n)
        return tuple(
            Stage(level, None if inner < 0 else inner, tuple(values))
            for (level, inner), values in sorted(found.items())
            if any(self.space[n].op not in CODELESS for n in values)
        )

    def is_late(self, n: int, i: int) -> bool:
        """Whether `n` reads `i` by element outside the sweep, or the pass, that makes it."""
        if n in self.roles.panels or i not in self.run or self.inner(i) is None:
            return False
        apart = self.run[i] != self.run[n] or self.passes[i] != self.passes[n]
        return apart or self.inner(i) != self.home(n)

    def strips(self) -> frozenset[int]:
        """Values with an inner atom that are read outside the sweep that makes them."""
        return frozenset(
            i
            for n in self.run
            for i in self.space[n].inputs
            if self.is_late(n, i) and self.space[i].op not in CODELESS
        )

    def read_whole(self, strips: Collection[int]) -> frozenset[int]:
        """Strips that a sum reads whole while it is swept along another atom."""
        return frozenset(
            i
            for n in self.roles.sums
            for i in self.space[n].inputs
            if i in strips and self.inner(i) != self.driver(n)
        )
