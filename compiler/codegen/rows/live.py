"""Whether every row keeps an element that is not masked, in the columns that are computed.

What is LOW may be left out of a maximum, and its exponential is zero, only beside an element that
is not LOW: a row without one is an average over all columns, those that are masked too. The selects
of a region may leave such an element each and none together, so every point is looked at with all
of them: rows and columns fall into few kinds of points, one for each way the selects decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.compiler.codegen.domain import Numbers, Space
from shardwright.compiler.codegen.rows.facts import Fact, Known, exact, facts, is_low, span_of
from shardwright.compiler.codegen.rows.spans import LOW_LIMIT

# Rows looked at together, point by point: a mask decides most blocks as a whole (our choice).
_AT_ONCE = 2048

Range = tuple[int, int]
Facts = Mapping[int, Known]


def relied_on(space: Space, numbers: Collection[int], known: Facts) -> set[int]:
    """Values that are LOW where `known` holds and read by maxima and exponentials."""
    found: set[int] = set()
    for n in numbers:
        value = space[n]
        if value.op in ("reduce", "exponential") or value.attrs.get("func") == "exponential":
            found.update(i for i in value.inputs if is_low(known.get(i)))
    return found


def lowered(space: Space, numbers: Collection[int], atom: int, whole: Facts) -> set[int]:
    """What the maxima over `atom` are of, where it may be LOW somewhere."""
    found: set[int] = set()
    for value in (space[n] for n in numbers):
        if value.op == "reduce" and value.attrs["kind"] == "max" and atom in value.over:
            found.update(i for i in value.inputs if span_of(whole.get(i)).low <= LOW_LIMIT)
    return found


@dataclass(frozen=True, slots=True)
class Rows:
    """The points `span` of the row atom; `whole` is what is known of `numbers` everywhere."""

    space: Space
    numbers: Numbers
    whole: Facts
    row: int
    span: Range

    def keep(self, number: int, atom: int, columns: Mapping[Range, Facts]) -> bool:
        """Whether each row has a point of `atom` in `columns` where the value is surely not LOW."""
        if any(_is_live(known, number) for known in columns.values()):
            return True
        chunks = list(columns)
        ends_first = [*chunks[:1], *chunks[:0:-1]]  # one of them is live in most masks
        first, end = self.span
        for start in range(first, end, _AT_ONCE):
            block = replace(self, span=(start, min(end, start + _AT_ONCE)))
            if not block._all_live(number, atom, ends_first):
                return False
        return True

    def _all_live(self, number: int, atom: int, chunks: Iterable[Range]) -> bool:
        live = np.zeros(self.span[1] - self.span[0], bool)
        for chunk in chunks:
            ranges = {self.row: self.span, atom: chunk}
            known = facts(self.space, self.numbers, ranges, self.whole)
            if _is_live(known, number):
                return True
            if not is_low(known.get(number)):
                live |= self._live(number, atom, chunk, known)
                if live.all():
                    return True
        return False

    def _live(self, number: int, atom: int, chunk: Range, known: Facts) -> Any:
        """The rows with a live point in a chunk."""
        live = np.zeros((self.span[1] - self.span[0], chunk[1] - chunk[0]), bool)
        for decided, points in self._kinds(number, atom, chunk, known):
            if points.any():
                made = facts(self.space, self.numbers, {}, self.whole, decided)
                live |= points & _is_live(made, number)
        return live.any(axis=1)

    def _kinds(
        self, number: int, atom: int, chunk: Range, known: Facts
    ) -> Iterator[tuple[dict[int, Known], Any]]:
        """(what each predicate behind the value is, the points where they are that)."""
        values = self.space.values
        needed = self.space.slice([number])
        preds = {values[n].inputs[0] for n in needed if values[n].op == "select"}
        fixed = {p: known[p] for p in preds if p in known}
        ranges = {self.row: self.span, atom: chunk}
        kinds: list[tuple[dict[int, Known], Any]] = [(fixed, np.True_)]
        for p in sorted(preds - set(fixed)):
            holds = exact(self.space, p, ranges, (self.row, atom))
            if holds is None:
                continue
            both = ((Fact.TRUE, holds), (Fact.FALSE, ~holds))
            split = ((was, points, is_, at) for was, points in kinds for is_, at in both)
            kinds = [(was | {p: is_}, points & at) for was, points, is_, at in split]
            kinds = [kind for kind in kinds if kind[1].any()]
        yield from kinds


def _is_live(known: Facts, number: int) -> bool:
    """Whether a value is as data is, whatever a predicate that depends on data says."""
    return span_of(known.get(number)).low > LOW_LIMIT
