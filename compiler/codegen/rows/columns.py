"""Which columns a row panel computes: runs of blocks, with selects decided and empty blocks left
out.

The columns of an inner iter dim are looked at in chunks of one transpose. A chunk is left out when
all that its passes would add is neutral: nothing to a maximum (LOW), nothing to a sum (ZERO). That
is right only if every row of the panel keeps an element that is not masked; otherwise all columns
are computed, as they are where every chunk is neutral.

What is LOW may be left out of a maximum, and its exponential is zero, only beside an element that
is not LOW: a row without one is an average over all columns, those that are masked too. The selects
of a kernel may leave such an element each and none together, so every point is looked at with all
of them: rows and columns fall into few kinds of points, one for each way the selects decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.compiler.codegen.builder import Piece, pieces
from shardwright.compiler.codegen.domain import Domain, Numbers
from shardwright.compiler.codegen.rows.float_intervals import LOW_LIMIT
from shardwright.compiler.codegen.rows.interval_analysis import (
    Fact,
    Facts,
    Known,
    Range,
    Ranges,
    exact,
    facts,
    interval_of,
    is_low,
)
from shardwright.compiler.codegen.rows.plan import RowPlan
from shardwright.compiler.isa.kernel import STORES

# Rows looked at together, point by point: a mask decides most blocks as a whole (our choice).
_AT_ONCE = 2048


def relied_on(domain: Domain, numbers: Collection[int], known: Facts) -> set[int]:
    """Values that are LOW where `known` holds and read by maxima and exponentials."""
    found: set[int] = set()
    for n in numbers:
        value = domain[n]
        if value.op in ("reduce", "exponential") or value.attrs.get("func") == "exponential":
            found.update(i for i in value.inputs if is_low(known.get(i)))
    return found


def lowered(domain: Domain, numbers: Collection[int], iter_dim: int, whole: Facts) -> set[int]:
    """What the maxima over `iter_dim` are of, where it may be LOW somewhere."""
    found: set[int] = set()
    for value in (domain[n] for n in numbers):
        if value.op == "reduce" and value.attrs["kind"] == "max" and iter_dim in value.over:
            found.update(i for i in value.inputs if interval_of(whole.get(i)).low <= LOW_LIMIT)
    return found


@dataclass(frozen=True, slots=True)
class Rows:
    """The points `span` of the row iter dim; `whole` is what is known of `numbers` everywhere."""

    domain: Domain
    numbers: Numbers
    whole: Facts
    row: int
    span: Range

    def keep(self, number: int, iter_dim: int, columns: Mapping[Range, Facts]) -> bool:
        """Whether each row has a point of `iter_dim` in `columns` where it is surely not LOW."""
        if any(_is_live(known, number) for known in columns.values()):
            return True
        chunks = list(columns)
        ends_first = [*chunks[:1], *chunks[:0:-1]]  # one of them is live in most masks
        first, end = self.span
        for start in range(first, end, _AT_ONCE):
            block = replace(self, span=(start, min(end, start + _AT_ONCE)))
            if not block._all_live(number, iter_dim, ends_first):
                return False
        return True

    def _all_live(self, number: int, iter_dim: int, chunks: Iterable[Range]) -> bool:
        live = np.zeros(self.span[1] - self.span[0], bool)
        for chunk in chunks:
            ranges = {self.row: self.span, iter_dim: chunk}
            known = facts(self.domain, self.numbers, ranges, self.whole)
            if _is_live(known, number):
                return True
            if not is_low(known.get(number)):
                live |= self._live(number, iter_dim, chunk, known)
                if live.all():
                    return True
        return False

    def _live(self, number: int, iter_dim: int, chunk: Range, known: Facts) -> Any:
        """The rows with a live point in a chunk."""
        live = np.zeros((self.span[1] - self.span[0], chunk[1] - chunk[0]), bool)
        for decided, points in self._kinds(number, iter_dim, chunk, known):
            if points.any():
                made = facts(self.domain, self.numbers, {}, self.whole, decided)
                live |= points & _is_live(made, number)
        return live.any(axis=1)

    def _kinds(
        self, number: int, iter_dim: int, chunk: Range, known: Facts
    ) -> Iterator[tuple[dict[int, Known], Any]]:
        """(what each predicate behind the value is, the points where they are that)."""
        values = self.domain.values
        needed = self.domain.slice([number])
        preds = {values[n].inputs[0] for n in needed if values[n].op == "select"}
        fixed = {p: known[p] for p in preds if p in known}
        ranges = {self.row: self.span, iter_dim: chunk}
        kinds: list[tuple[dict[int, Known], Any]] = [(fixed, np.True_)]
        for p in sorted(preds - set(fixed)):
            holds = exact(self.domain, p, ranges, (self.row, iter_dim))
            if holds is None:
                continue
            both = ((Fact.TRUE, holds), (Fact.FALSE, ~holds))
            split = ((was, points, is_, at) for was, points in kinds for is_, at in both)
            kinds = [(was | {p: is_}, points & at) for was, points, is_, at in split]
            kinds = [kind for kind in kinds if kind[1].any()]
        yield from kinds


def _is_live(known: Facts, number: int) -> bool:
    """Whether a value is as data is, whatever a predicate that depends on data says."""
    return interval_of(known.get(number)).low > LOW_LIMIT


# Chunks to as many columns as a panel has rows, at least (our choice).
_FINEST = 64

Choices = frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of columns where some selects are decided: pairs of a select and the branch it is."""

    piece: Piece
    decided: Choices = frozenset()


@dataclass(frozen=True, slots=True)
class ColumnTile:
    """Columns whose packed tiles are on chip together; `runs` count from its first column."""

    piece: Piece
    runs: tuple[Run, ...]


Around = tuple[tuple[Run, ...], ...]
"""What row panels compute of a column tile that lies around them, each; () without one."""


class Columns:
    """The columns of one plan, by row panel."""

    def __init__(self, plan: RowPlan, chunk: int, width: int) -> None:
        self.plan, self.domain = plan, plan.domain
        self.chunk, self.width = chunk, width
        self.read_whole = plan.read_whole
        wanted = {*plan.roles.rows, *plan.roles.sums, *plan.roles.shared}
        self.numbers = plan.domain.slice(wanted)
        self.whole = facts(plan.domain, self.numbers, {})
        self.selects = [n for n in plan.roles.rows if plan.domain[n].op == "select"]
        self.masked = [a for a in sorted(plan.roles.inner) if self._is_masked(a)]
        self._found: dict[tuple[int, Range], tuple[Run, ...]] = {}

    def _is_masked(self, iter_dim: int) -> bool:
        """Whether a select compares positions of rows with positions along `iter_dim`."""
        return any(
            iter_dim in self.domain[n].iter_dims and self._is_known(self.domain[n].inputs[0])
            for n in self.selects
        )

    def _is_known(self, pred: int) -> bool:
        """Whether a predicate tells rows apart, and no register (a core's place) moves it."""
        behind = [self.domain[n] for n in self.domain.slice([pred])]
        moved = any(v.op == "register" or (v.map and v.map.offset.terms) for v in behind)
        return self.plan.row in self.domain[pred].iter_dims and not moved

    def runs(self, iter_dim: int, rows: Range) -> tuple[Run, ...]:
        """Runs of blocks of `iter_dim` that the rows `rows` (first, end) compute, in order."""
        key = (iter_dim, rows)
        if key not in self._found:
            self._found[key] = self._runs(iter_dim, rows)
        return self._found[key]

    def column_tiles(self, iter_dim: int, rows: Range, length: int) -> list[ColumnTile]:
        """The same in column tiles of up to `length`; equal neighbours are one that repeats."""
        found: list[ColumnTile] = []
        for run in self.runs(iter_dim, rows):
            extent = run.piece.extent
            blocks = max(1, length // extent)
            for part in pieces(run.piece.trip, min(run.piece.trip, blocks)):
                start = run.piece.start + part.start * extent
                piece = Piece(start, part.extent * extent, part.trip)
                alone = ColumnTile(piece, (Run(Piece(0, extent, part.extent), run.decided),))
                joined = _joined(found[-1], alone, length) if found else None
                found[-1:] = [joined] if joined else [*found[-1:], alone]
        return found

    def around(
        self, iter_dim: int, panels: Sequence[Range], length: int
    ) -> list[tuple[Piece, Around]]:
        """Column tiles of up to `length` points of `iter_dim`, and what each of the `panels` of
        rows computes of one, counted from its first point; alike neighbours are one that repeats.
        """
        found: list[tuple[Piece, Around]] = []
        for piece in pieces(self.domain.sizes[iter_dim], min(length, self.domain.sizes[iter_dim])):
            for first in range(piece.start, piece.start + piece.trip * piece.extent, piece.extent):
                span = (first, first + piece.extent)
                runs = tuple(self._part(self.runs(iter_dim, rows), span) for rows in panels)
                last = found[-1] if found else None
                if last and last[1] == runs and last[0].extent == piece.extent:
                    found[-1] = replace(last[0], trip=last[0].trip + 1), runs
                else:
                    found.append((Piece(first, piece.extent), runs))
        return found

    def _part(self, runs: Sequence[Run], span: Range) -> tuple[Run, ...]:
        """What lies in a column tile of the iter dim's runs."""
        found: list[tuple[Range, Choices]] = []
        for run in runs:
            end = run.piece.start + run.piece.extent * run.piece.trip
            first, end = max(run.piece.start, span[0]), min(end, span[1])
            if first >= end:
                continue
            _extend(found, (first, end), run.decided)
        return tuple(
            replace(run, piece=_moved(run.piece, -span[0]))
            for part in found
            for run in self._cut(*part)
        )

    def _runs(self, iter_dim: int, rows: Range) -> tuple[Run, ...]:
        size = self.domain.sizes[iter_dim]
        if iter_dim not in self.masked:
            return tuple(Run(p) for p in pieces(size, min(size, self.width)))
        known = {c: self._facts(iter_dim, c, rows) for c in self._chunks(iter_dim, rows)}
        skipped = {c for c, found in known.items() if self._is_neutral(iter_dim, found)}
        if len(skipped) == len(known) or not self._rows_live(iter_dim, rows, known, skipped):
            skipped = set()  # what is read later needs code that writes it, all zero or not
        kept = [c for c in known if c not in skipped]
        return tuple(run for group in self._alike(kept, known) for run in self._cut(*group))

    def _chunks(self, iter_dim: int, rows: Range) -> list[Range]:
        """Chunks of columns that are decided as a whole, no finer than so many rows deserve."""
        size = self.domain.sizes[iter_dim]
        chunk = self.chunk * self.plan.fold.get(iter_dim, 1)
        while _FINEST * chunk * 2 <= rows[1] - rows[0]:
            chunk *= 2
        return [(s, min(size, s + chunk)) for s in range(0, size, chunk)]

    def _facts(self, iter_dim: int, chunk: Range, rows: Range) -> Facts:
        ranges: Ranges = {iter_dim: chunk, self.plan.row: rows}
        return facts(self.domain, self.numbers, ranges, self.whole)

    def _is_neutral(self, iter_dim: int, known: Facts) -> bool:
        passes = [s for s in self.plan.passes if s.inner == iter_dim]
        return all(self._adds_nothing(n, known) for s in passes for n in s.values)

    def _adds_nothing(self, number: int, known: Facts) -> bool:
        value, plan = self.domain[number], self.plan
        if value.op in STORES:
            return False
        given = [known.get(i) for i in value.inputs]
        if number in plan.roles.sums:
            return Fact.ZERO in given
        if value.op == "reduce":
            kind = value.attrs["kind"]
            return is_low(given[0]) if kind == "max" else kind == "add" and given[0] is Fact.ZERO
        whole = number in self.read_whole
        return (number not in plan.transposed or known.get(number) is Fact.ZERO) and not whole

    def _rows_live(
        self, iter_dim: int, rows: Range, known: dict[Range, Facts], skipped: set[Range]
    ) -> bool:
        """Whether every row has, for each value whose low elements are left out, one that is not
        low in a chunk that is computed; and whether no maximum over other iter dims is low.
        """
        kept = {c: known[c] for c in known if c not in skipped}
        mine = Rows(self.domain, tuple(self.numbers), self.whole, self.plan.row, rows)
        masked = {n for c in skipped for n in relied_on(self.domain, self.numbers, known[c])}
        if not all(mine.keep(n, iter_dim, kept) for n in masked):
            return False
        return not skipped or all(self._has_maxima(mine, o) for o in self.masked if o != iter_dim)

    def _has_maxima(self, rows: Rows, iter_dim: int) -> bool:
        """Whether every row has a maximum over `iter_dim` that is not low."""
        low = lowered(self.domain, self.numbers, iter_dim, self.whole)
        known = (
            {c: self._facts(iter_dim, c, rows.span) for c in self._chunks(iter_dim, rows.span)}
            if low
            else {}
        )
        return all(rows.keep(n, iter_dim, known) for n in low)

    def _alike(
        self, kept: Sequence[Range], known: dict[Range, Facts]
    ) -> list[tuple[Range, Choices]]:
        """Neighbouring chunks with the same decided selects, joined."""
        found: list[tuple[Range, Choices]] = []
        for chunk in kept:
            _extend(found, chunk, self._choices(known[chunk]))
        return found

    def _choices(self, known: Facts) -> Choices:
        """Selects that are one of their branches, and which."""
        found: set[tuple[int, int]] = set()
        for n in self.selects:
            pred, on_true, on_false = self.domain[n].inputs
            if known.get(pred) in (Fact.TRUE, Fact.FALSE):
                found.add((n, on_true if known[pred] is Fact.TRUE else on_false))
        return frozenset(found)

    def _cut(self, span: Range, choices: Choices) -> list[Run]:
        """Blocks of a span."""
        size = span[1] - span[0]
        return [
            Run(Piece(span[0] + p.start, p.extent, p.trip), choices)
            for p in pieces(size, min(size, self.width))
        ]


def _joined(a: ColumnTile, b: ColumnTile, length: int) -> ColumnTile | None:
    """Two neighbours as one column tile; None when they are none, or too long."""
    extent = a.piece.extent + b.piece.extent
    once = a.piece.trip == b.piece.trip == 1
    if not once or extent > length or a.piece.start + a.piece.extent != b.piece.start:
        return None
    moved = (replace(r, piece=_moved(r.piece, a.piece.extent)) for r in b.runs)
    return ColumnTile(Piece(a.piece.start, extent), (*a.runs, *moved))


def _extend(found: list[tuple[Range, Choices]], span: Range, choices: Choices) -> None:
    """Add columns to those `found`, joined with neighbours of the same choices."""
    if found and found[-1][1] == choices and found[-1][0][1] == span[0]:
        span = (found.pop()[0][0], span[1])
    found.append((span, choices))


def _moved(piece: Piece, by: int) -> Piece:
    return replace(piece, start=piece.start + by)
