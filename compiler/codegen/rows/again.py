"""Values made again in the sweep that reads them, so that no sweep keeps them for a later one.

What a strip is made of (products with panels, loads, columns) is still there when a later sweep
runs, so the strip can be computed there a second time: scores cost one more product per block, and
a row then takes no SBUF that grows with its length. Values and their roundings are the same. Next:
`plan.py` uses this where strips do not fit, and between the passes of a streamed row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.domain import Rewriting, Space
from shardwright.compiler.codegen.rows.levels import Levels
from shardwright.compiler.support.walks import answered


@dataclass(frozen=True, slots=True)
class Again:
    """A rewritten space: new numbers of the old values, and the numbers of what is made again."""

    space: Space
    number: dict[int, int]
    copies: frozenset[int]


def made_again(levels: Levels) -> Again:
    """The space with copies of strips for late readers, those in step with a later sweep."""

    def late(n: int, i: int) -> bool:
        return n in levels.run and levels.is_late(n, i) and levels.inner(i) == levels.home(n)

    return _Copier(levels, levels.run, late, lambda i: levels.inner(i) is not None).again()


def made_in_passes(levels: Levels) -> Again:
    """The space with copies of what lies along the streamed atom for readers in later passes."""
    passes = levels.passes

    def moves(i: int) -> bool:
        return levels.inner(i) == levels.sweeping.streamed

    def late(n: int, i: int) -> bool:
        return n in passes and i in passes and moves(i) and passes[n] != passes[i]

    return _Copier(levels, passes, late, moves).again()


class _Copier(Rewriting):
    """Copies at the `place` of a reader of what is `late` for it and `moves`."""

    def __init__(
        self,
        levels: Levels,
        place: Mapping[int, int],
        late: Callable[[int, int], bool],
        moves: Callable[[int], bool],
    ) -> None:
        super().__init__(levels.space)
        self.panels, self.place, self.late, self.moves = levels.roles.panels, place, late, moves
        self.copies: dict[tuple[int, int], int] = {}  # (value, place) -> copy

    def again(self) -> Again:
        """The rewriting."""
        return Again(self.run(), self.number, frozenset(self.copies.values()))

    def read(self, n: int, i: int) -> int:
        """What reader `n` reads for `i`: where it is late and not there, a copy of its own."""
        if not self.late(n, i) or self._stays(i, self.place[n]):
            return self.number[i]
        return answered((i, self.place[n]), self.copies, self._read_again, self._copy)

    def _stays(self, i: int, place: int) -> bool:
        return i not in self.place or not self.moves(i) or self.place[i] == place

    def _read_again(self, wanted: tuple[int, int]) -> list[tuple[int, int]]:
        """What a copy reads that is made again too."""
        i, place = wanted
        read = () if i in self.panels else self.old.values[i].inputs
        return [(j, place) for j in read if not self._stays(j, place)]

    def _copy(self, wanted: tuple[int, int]) -> int:
        i, place = wanted
        value, again = self.old.values[i], set(self._read_again(wanted))
        inputs = (
            self.copies[j, place] if (j, place) in again else self.number[j] for j in value.inputs
        )
        return self.add(replace(value, inputs=tuple(inputs)))
