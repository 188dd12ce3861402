"""Values made again in the sweep that reads them, so that no sweep keeps them for a later one.

What a strip is made of (products with panels, loads, columns) is still there when a later sweep
runs, so the strip can be computed there a second time: scores cost one more product per block, and
a row then takes no SBUF that grows with its length. Values and their roundings are the same. Next:
`plan.py` uses this where strips do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from compiler.codegen.rows.levels import Levels
from compiler.codegen.space import Space, Value


@dataclass(frozen=True, slots=True)
class Again:
    """A rewritten space: new numbers of the old values, and the numbers of what is made again."""

    space: Space
    number: dict[int, int]
    copies: frozenset[int]


def made_again(levels: Levels) -> Again:
    """The space of `levels` with copies of strips in front of their late readers."""
    return _Copier(levels).run()


@dataclass(slots=True)
class _Copier:
    levels: Levels
    values: list[Value] = field(default_factory=list)
    number: dict[int, int] = field(default_factory=dict)
    made: dict[tuple[int, int], int] = field(default_factory=dict)  # (value, level) -> copy

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
        """What reader `n` reads for `i`: a copy when it is in step with a later sweep."""
        levels = self.levels
        late = n in levels.run and levels.is_late(n, i) and levels.inner(i) == levels.home(n)
        return self._copy(i, levels.run[n]) if late else self.number[i]

    def _copy(self, i: int, level: int) -> int:
        """`i` at `level`: itself when it is there anyway, else made from what its maker reads."""
        levels, value = self.levels, self.levels.space.values[i]
        if i not in levels.run or levels.inner(i) is None or levels.run[i] == level:
            return self.number[i]
        if (i, level) not in self.made:
            product = i in levels.roles.panels
            inputs = (self.number[j] if product else self._copy(j, level) for j in value.inputs)
            self.made[i, level] = self._add(replace(value, inputs=tuple(inputs)))
        return self.made[i, level]
