"""A section: a stretch of program order that is the same code for one layer after the other.

Every operand of every op is looked at in all iterations: it is made in the same iteration, in the
one before (a carry), one value for all layers, or one of a pack (`packs.py`). Packs are in layer
order; a backward pass walks them from the last layer to the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.ir.ops import BroadcastInDimAttrs, ReshapeAttrs
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.prepare.reroll.packs import Pack, Packer, RefusedError, Results, Values
from shardwright.sharding.prepare.reroll.periods import Run

Place = tuple[int, int]  # position in the body, result number
REPEATING = (BroadcastInDimAttrs, ReshapeAttrs)
"""Of ops whose result is not kept for another loop: what they read is never larger."""
ATTEMPTS = 3
"""Starts that are tried where layers may be cut at several ops (our choice)."""


@dataclass(frozen=True, slots=True)
class Own:
    """An operand made in the same iteration."""

    place: Place


@dataclass(frozen=True, slots=True)
class Before:
    """An operand made in the iteration before."""

    place: Place


@dataclass(frozen=True, slots=True)
class Each:
    """An operand that every iteration has its own of, made elsewhere: in order of iterations."""

    values: Values


Source = Own | Before | Each | Value | Pack


@dataclass(slots=True, eq=False)
class Section:
    """Iterations of a body. `rows[i][k]` is op `k` of iteration `i`, `sources[k]` what it reads,
    `carries` maps what the next iteration reads to what the first one reads instead.
    """

    rows: Sequence[Sequence[Op]]
    sources: list[list[Source]] = field(default_factory=list)
    carries: dict[Place, Value] = field(default_factory=dict)
    is_reversed: bool = False
    packs: dict[tuple[Place, bool], Results] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Iterations."""
        return len(self.rows)

    def in_layer_order(self, values: Values) -> Values:
        """Values of all iterations, the first layer's first."""
        return values[::-1] if self.is_reversed else values

    def values(self, place: Place) -> Values:
        """What the iterations make at `place`, in their order."""
        return tuple([row[place[0]].results[place[1]] for row in self.rows])

    def repeated(self, pack: Results) -> tuple[Op, Pack] | None:
        """The op that repeats a smaller pack to make the results, and that pack; None for results
        that are no repetition.
        """
        op = self.rows[0][pack.place[0]]
        if pack.before or not isinstance(op.attrs, REPEATING):
            return None
        source = self.sources[pack.place[0]][0]
        if isinstance(source, Own):
            return op, self.packs[source.place, False]
        return (op, source) if isinstance(source, Pack) else None

    def late(self, pack: Results) -> Results | None:
        """The carry of a result at the begin of every iteration; None for what is no carry."""
        if pack.place not in self.carries:
            return None
        if (pack.place, True) not in self.packs:
            values = (self.carries[pack.place], *self.values(pack.place)[:-1])
            late = Results(self.in_layer_order(values), self, pack.place, before=True)
            self.packs[pack.place, True] = late
        return self.packs[pack.place, True]


def found_section(ops: Sequence[Op], run: Run, packer: Packer) -> tuple[Section, Packer]:
    """The section of a run, and the packs with its results. Raises RefusedError."""
    reason = RefusedError("its layers do not depend on each other")
    for start in _starts(ops, run, packer):
        rows = [
            ops[at : at + run.period]
            for at in range(start, start + run.period * run.count, run.period)
        ]
        after = packer.snapshot()
        try:
            return _section(rows, after), after
        except RefusedError as refused:
            reason = refused
    raise reason


def _starts(ops: Sequence[Op], run: Run, packer: Packer) -> Sequence[int]:
    """Where layers may begin, the likeliest first: where an iteration reads leaves of one layer, or
    leaves that lie together as long as layers are not known, and little passes on to the next.
    """
    window = ops[run.first : run.first + run.period * run.count + run.rest]
    crossing = _crossing_bytes(window)
    number = {v: i for i, v in enumerate(packer.graph.inputs)}

    def rank(skipped: int) -> tuple[int, int, int]:
        layer = window[skipped + run.period : skipped + 2 * run.period]
        read = {v for op in layer for v in op.operands if v in number}
        known = {packer.member[v][1] for v in read if v in packer.member}
        gaps = np.diff(np.sort([number[v] for v in read if v not in packer.member]))
        return len(known), int((gaps > 1).sum()), int(crossing[skipped + run.period])

    offsets = sorted(range(run.rest + 1), key=lambda at: int(crossing[at + run.period]))
    offsets = sorted(offsets[: 8 * ATTEMPTS], key=rank)
    return [run.first + at for at in offsets[:ATTEMPTS]]


def _crossing_bytes(ops: Sequence[Op]) -> np.ndarray:
    """Bytes made in front of each op and read from it on, among `ops`."""
    made: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for at, op in enumerate(ops):
        last.update((v, at) for v in op.operands if v in made)
        made.update((v, at) for v in op.results)
    change = np.zeros(len(ops) + 1, np.int64)
    for value, end in last.items():
        change[made[value] + 1] += value.type.num_bytes
        change[end + 1] -= value.type.num_bytes
    return np.cumsum(change)


def _section(rows: Sequence[Sequence[Op]], packer: Packer) -> Section:
    section = Section(rows)
    place: dict[Value, tuple[int, Place]] = {}
    for i, row in enumerate(rows):
        for k, op in enumerate(row):
            place.update((v, (i, (k, r))) for r, v in enumerate(op.results))
    for ops in zip(*rows, strict=True):
        columns = zip(*(op.operands for op in ops), strict=True)
        section.sources.append([_source(section, column, place, packer) for column in columns])
    if not section.carries:
        raise RefusedError("its layers do not depend on each other")
    section.is_reversed = _is_reversed(section, packer)
    packer.inside.update((op, section) for row in rows for op in row)
    for k, sources in enumerate(section.sources):
        for slot, source in enumerate(sources):
            if isinstance(source, Each):
                section.sources[k][slot] = packer.pack(section.in_layer_order(source.values))
    for k, op in enumerate(rows[0]):
        for r in range(len(op.results)):
            members = section.in_layer_order(section.values((k, r)))
            pack = section.packs[(k, r), False] = Results(members, section, (k, r))
            packer.add(pack)
    return section


def _source(
    section: Section,
    values: Values,
    place: Mapping[Value, tuple[int, Place]],
    packer: Packer,
) -> Source:
    """What an operand is in all iterations. Raises RefusedError."""
    one = packer.same(values)
    if one is not None and one not in place:
        return one
    found = [place.get(v) for v in values]
    if not any(found):
        return Each(values)
    here = found[1]
    if here is None or one is not None:
        raise RefusedError("some layers read what only other layers make")
    if all(at == (i, here[1]) for i, at in enumerate(found)):
        return Own(here[1])
    if found[0] is not None or any(at != (i, here[1]) for i, at in enumerate(found[1:])):
        raise RefusedError("layers read more than the layer before")
    if section.carries.setdefault(here[1], values[0]) is not values[0]:
        raise RefusedError("the first layer starts with several values where others have one")
    return Before(here[1])


def _is_reversed(section: Section, packer: Packer) -> bool:
    """True when iterations walk packs from the last layer to the first. Raises RefusedError."""
    for values in _each(section):
        before, after = (packer.member.get(v) for v in values[1:3])
        if before and after and before[0] is after[0]:
            if len(before[0].members) != section.count or abs(after[1] - before[1]) != 1:
                raise RefusedError("layers are read in an order that is no order of layers")
            return after[1] < before[1]
    return False


def _each(section: Section) -> Iterator[Values]:
    for sources in section.sources:
        yield from (s.values for s in sources if isinstance(s, Each))
