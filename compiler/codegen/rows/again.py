"""Values made again in the sweep that reads them, so that no sweep keeps them for a later one.

What a strip is made of (products with panels, loads, columns) is still there when a later sweep
runs, so the strip can be computed there a second time: scores cost one more product per block, and
a row then takes no SBUF that grows with its length. Values and their roundings are the same. Next:
`plan.py` uses this where strips do not fit, and between the passes of a streamed row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shardwright.compiler.codegen.domain import Value
from shardwright.compiler.codegen.rows.levels import Levels
from shardwright.compiler.codegen.space import Space
from shardwright.compiler.support.walks import answered


@dataclass(frozen=True, slots=True)
class Again:
    """A rewritten space: new numbers of the old values, and the numbers of what is made again."""

    space: Space
    number: dict[int, int]
    copies: frozenset[int]


def made_again(levels: Levels) -> Again:
    """The space of `levels` with copies of strips in front of their late readers: those in step
    with a later sweep.
    """

    def late(n: int, i: int) -> bool:
        return n in levels.run and levels.is_late(n, i) and levels.inner(i) == levels.home(n)

    return _Copier(levels, levels.run, late, lambda i: levels.inner(i) is not None).run()


def made_in_passes(levels: Levels) -> Again:
    """The space of `levels` with copies of what lies along the streamed atom in front of readers in
    a later pass.
    """
    passes = levels.passes

    def moves(i: int) -> bool:
        return levels.inner(i) == levels.sweeping.streamed

    def late(n: int, i: int) -> bool:
        return n in passes and i in passes and moves(i) and passes[n] != passes[i]

    return _Copier(levels, passes, late, moves).run()


@dataclass(slots=True)
class _Copier:
    """`place` of a value is where it is made; `late` (reader, value) are read in another place, and
    what `moves` is made again there.
    """

    levels: Levels
    place: Mapping[int, int]
    late: Callable[[int, int], bool]
    moves: Callable[[int], bool]
    values: list[Value] = field(default_factory=list)
    number: dict[int, int] = field(default_factory=dict)
    made: dict[tuple[int, int], int] = field(default_factory=dict)  # (value, place) -> copy

    def run(self) -> Again:
        """The rewriting."""
        old = self.levels.space
        for n, value in enumerate(old.values):
            inputs = tuple(self._input(n, i) for i in value.inputs)
            self.number[n] = self._add(replace(value, inputs=inputs))
        space = replace(old, values=self.values)
        return Again(space, self.number, frozenset(self.made.values()))

    def _add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _input(self, n: int, i: int) -> int:
        """What reader `n` reads for `i`."""
        return self._copy(i, self.place[n]) if self.late(n, i) else self.number[i]

    def _copy(self, i: int, place: int) -> int:
        """`i` at `place`: itself when it is there anyway, else made from what its maker reads."""
        if self._stays(i, place):
            return self.number[i]
        return answered((i, place), self.made, self._read_again, self._make)

    def _stays(self, i: int, place: int) -> bool:
        return i not in self.place or not self.moves(i) or self.place[i] == place

    def _read_again(self, wanted: tuple[int, int]) -> list[tuple[int, int]]:
        """What a copy reads that is made again too."""
        i, place = wanted
        product = i in self.levels.roles.panels
        read = () if product else self.levels.space.values[i].inputs
        return [(j, place) for j in read if not self._stays(j, place)]

    def _make(self, wanted: tuple[int, int]) -> int:
        i, place = wanted
        value, again = self.levels.space.values[i], set(self._read_again(wanted))
        inputs = (
            self.made[j, place] if (j, place) in again else self.number[j] for j in value.inputs
        )
        return self._add(replace(value, inputs=tuple(inputs)))
