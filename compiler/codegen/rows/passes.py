"""In which pass every value of a row tile is made, and what is then kept whole or rematerialised.

A value that reads a reduction or a transposed operand belongs to a later pass than what it reads;
values of one pass number and inner iter dim share one. What another pass reads again lies in a
row-resident buffer. Where a row is blocked, passes lie in loops over its column tiles.

What a row buffer is made of (products with packed tiles, loads, columns) is still there when a
later pass runs, so it can be computed there a second time: scores cost one more product per block,
and a row then takes no SBUF that grows with its length. Values and their roundings are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.domain import CODELESS, Domain, Numbers, Rewriting
from shardwright.compiler.codegen.rows.online import Running, merged
from shardwright.compiler.codegen.rows.roles import Roles, inner_of
from shardwright.compiler.isa.kernel import STORES
from shardwright.compiler.support.walks import answered


@dataclass(frozen=True, slots=True)
class Pass:
    """Work on one row tile: a pass over the loop `inner`, or single columns when it is None."""

    number: int
    inner: int | None
    values: Numbers


@dataclass(frozen=True, slots=True)
class BlockLoop:
    """Passes that run together, once per column tile if `blocked`, with `running` columns."""

    blocked: bool
    passes: tuple[Pass, ...]
    running: tuple[Running, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """How the passes of a plan are laid out. With `early`, what is made from loads for another
    pass and values of the first one need not be kept.
    """

    whole: frozenset[int]  # operands that are loaded for all rows and belong to no pass
    own_pass: frozenset[int] = frozenset()  # values that wait for a pass of their own
    vectors: frozenset[int] = frozenset()  # made in passes although they do not span the rows
    remat: frozenset[int] = frozenset()  # values that are made where they are read
    early: bool = False  # loads for another pass come before the first one
    blocked: int = -1  # iter dim of which only a column tile is on chip at a time (-1: none)
    online: bool = False  # loops over it work with what is not complete where they can


def _sources(domain: Domain) -> set[int]:
    """Values that are made from loads and constants alone."""
    found: set[int] = set()
    for n, value in enumerate(domain.values):
        if value.op not in ("reduce", "contract", *STORES) and found.issuperset(value.inputs):
            found.add(n)
    return found


class PassSchedule:
    """The number of the pass every row value and sum is made in (`run`)."""

    def __init__(self, domain: Domain, roles: Roles, options: PassOptions) -> None:
        self.domain, self.roles, self.options = domain, roles, options
        self.run: dict[int, int] = {}
        self.sources = _sources(domain)
        self.numbers = self._needed()
        for n in self.numbers:
            read = [i for i in domain[n].inputs if i in self.run and not self._is_whole(n, i)]
            first = -1 if options.early and n in self.sources else 0
            self.run[n] = max([first, *(self._earliest(n, i) for i in read)])
        self._delay()
        self.loops = self._in_loops()
        self.running: tuple[Running, ...] = ()
        if options.online:
            self.loops, self.running = merged(self, self.loops)

    def _needed(self) -> list[int]:
        """Rows and sums, without what only operands that are loaded whole need."""
        mine = {*self.roles.rows, *self.roles.sums, *self.options.vectors}
        wanted = {n for n in mine if n in self.roles.sums or self.domain[n].op in STORES}
        for n in sorted(mine, reverse=True):
            if n in wanted:
                wanted.update(i for i in self.domain[n].inputs if not self._is_whole(n, i))
        return sorted(wanted & mine)

    def _is_whole(self, n: int, i: int) -> bool:
        return n in self.roles.packed and i in self.options.whole

    def inner(self, number: int) -> int | None:
        """The inner iter dim a value spans."""
        return inner_of(self.roles, self.domain[number])

    def home(self, number: int) -> int | None:
        """The inner iter dim of the pass a value is made in."""
        value = self.domain[number]
        if number in self.roles.sums:
            return self.driver(number)
        if value.op == "reduce":
            return self.inner(value.inputs[0])
        return self.inner(number)

    def driver(self, number: int) -> int | None:
        """The inner iter dim a sum is swept along: that of the operand that is ready last."""
        inputs = [i for i in self.domain[number].inputs if self.inner(i) is not None]
        if not inputs:
            return None
        size = self.domain.sizes
        return self.inner(max(inputs, key=lambda i: (self.run[i], size[self.inner(i) or 0])))

    def _earliest(self, n: int, i: int) -> int:
        """First pass in which `n` can read `i`."""
        at = self.run[i] + (self.domain[i].op == "reduce" or self.is_carried(i))
        inner = self.inner(i)
        in_step = inner is None or (inner == self.home(n) and n not in self.roles.packed)
        return at if in_step and not self._waits(n, i) else at + 1

    def _waits(self, n: int, i: int) -> bool:
        """Whether `n` is read transposed and made from `i` alone: it costs one more row buffer."""
        if n not in self.options.own_pass or i in self.sources or i in self.roles.packed:
            return False
        return [m for m in self.domain[n].inputs if self.inner(m) is not None] == [i]

    def _delay(self) -> None:
        """Values made from loads alone, or rematerialised, move to where they are first read."""
        remat = self.options.remat
        early = [n for n in self.numbers if n in remat or n in self.sources]
        users = self.domain.users(self.numbers)
        for n in reversed(early):
            readers = [u for u in users.get(n, ()) if not self._is_whole(u, n)]
            if readers and not any(u in self.roles.packed for u in readers):
                step = {u: self._earliest(u, n) - self.run[n] for u in readers}
                self.run[n] = min(self.run[u] - step[u] for u in readers)

    def is_carried(self, number: int) -> bool:
        """Whether a row value adds up the blocked iter dim: it is carried between column tiles."""
        return self.options.blocked in self.domain[number].over and number not in self.roles.sums

    def _is_blocked(self, number: int) -> bool:
        """Whether a value needs the blocked iter dim on chip, tile by tile."""
        value, iter_dim = self.domain[number], self.options.blocked
        read = value.inputs if number in self.roles.sums else ()
        return iter_dim in value.iter_dims | value.over or any(
            self.inner(i) == iter_dim for i in read
        )

    def _in_loops(self) -> dict[int, int]:
        """The loop of every value: odd ones go over the column tiles, others follow from them."""
        found: dict[int, int] = {}
        for n in self.numbers:
            read = [i for i in self.domain[n].inputs if i in self.run]
            first = max((found[i] + self.is_carried(i) for i in read), default=0)
            found[n] = first + (first % 2 != self._is_blocked(n))
        users = self.domain.users(self.numbers)
        for n in reversed(self.numbers):
            if self._is_blocked(n) and n in users and not self.is_carried(n):
                found[n] = min(found[u] for u in users[n])
        return found

    def in_loops(self) -> tuple[BlockLoop, ...]:
        """The passes of every loop in order."""
        found = (
            BlockLoop(
                at % 2 == 1,
                self._passes([n for n in self.run if self.loops[n] == at]),
                tuple(r for r in self.running if self.loops[r.column] == at),
            )
            for at in sorted(set(self.loops.values()))
        )
        return tuple(one for one in found if one.passes)

    def _passes(self, numbers: Collection[int]) -> tuple[Pass, ...]:
        """Numbers in order; within one, single columns first, as its other passes read them."""
        found: dict[tuple[int, int], list[int]] = {}
        for n in sorted(numbers):
            home = self.home(n)
            found.setdefault((self.run[n], -1 if home is None else home), []).append(n)
        return tuple(
            Pass(number, None if inner < 0 else inner, tuple(values))
            for (number, inner), values in sorted(found.items())
            if any(self.domain[n].op not in CODELESS for n in values)
        )

    def is_late(self, n: int, i: int) -> bool:
        """Whether `n` reads `i` by element outside the pass, or the loop, that makes it."""
        if n in self.roles.packed or i not in self.run or self.inner(i) is None:
            return False
        apart = self.run[i] != self.run[n] or self.loops[i] != self.loops[n]
        return apart or self.inner(i) != self.home(n)

    def row_buffers(self) -> frozenset[int]:
        """Values with an inner iter dim that are read outside the pass that makes them."""
        return frozenset(
            i
            for n in self.run
            for i in self.domain[n].inputs
            if self.is_late(n, i) and self.domain[i].op not in CODELESS
        )

    def read_whole(self, row_buffers: Collection[int]) -> frozenset[int]:
        """Row buffers that a sum reads whole while it is swept along another iter dim."""
        return frozenset(
            i
            for n in self.roles.sums
            for i in self.domain[n].inputs
            if i in row_buffers and self.inner(i) != self.driver(n)
        )


@dataclass(frozen=True, slots=True)
class Remat:
    """A rewritten domain, the new numbers of the old values, those of what is rematerialised."""

    domain: Domain
    number: dict[int, int]
    copies: frozenset[int]


def rematerialised(schedule: PassSchedule) -> Remat:
    """The domain with copies of row buffers for late readers, those in step with a later pass."""

    def late(n: int, i: int) -> bool:
        is_late = n in schedule.run and schedule.is_late(n, i)
        return is_late and schedule.inner(i) == schedule.home(n)

    return _Copier(schedule, schedule.run, late, lambda i: schedule.inner(i) is not None).remat()


def made_in_loops(schedule: PassSchedule) -> Remat:
    """The domain with copies of what lies along the blocked iter dim for later loops."""
    loops = schedule.loops

    def moves(i: int) -> bool:
        return schedule.inner(i) == schedule.options.blocked

    def late(n: int, i: int) -> bool:
        return n in loops and i in loops and moves(i) and loops[n] != loops[i]

    return _Copier(schedule, loops, late, moves).remat()


class _Copier(Rewriting):
    """Copies at the `place` of a reader of what is `late` for it and `moves`."""

    def __init__(
        self,
        schedule: PassSchedule,
        place: Mapping[int, int],
        late: Callable[[int, int], bool],
        moves: Callable[[int], bool],
    ) -> None:
        super().__init__(schedule.domain)
        self.packed, self.place, self.late, self.moves = schedule.roles.packed, place, late, moves
        self.copies: dict[tuple[int, int], int] = {}  # (value, place) -> copy

    def remat(self) -> Remat:
        """The rewriting."""
        return Remat(self.run(), self.number, frozenset(self.copies.values()))

    def read(self, n: int, i: int) -> int:
        """What reader `n` reads for `i`: where it is late and not there, a copy of its own."""
        if not self.late(n, i) or self._stays(i, self.place[n]):
            return self.number[i]
        return answered((i, self.place[n]), self.copies, self._read_by, self._copy)

    def _stays(self, i: int, place: int) -> bool:
        return i not in self.place or not self.moves(i) or self.place[i] == place

    def _read_by(self, wanted: tuple[int, int]) -> list[tuple[int, int]]:
        """What a copy reads that is rematerialised too."""
        i, place = wanted
        read = () if i in self.packed else self.old.values[i].inputs
        return [(j, place) for j in read if not self._stays(j, place)]

    def _copy(self, wanted: tuple[int, int]) -> int:
        i, place = wanted
        value, remat = self.old.values[i], set(self._read_by(wanted))
        inputs = (
            self.copies[j, place] if (j, place) in remat else self.number[j] for j in value.inputs
        )
        return self.add(replace(value, inputs=tuple(inputs)))
