"""Micro-batches in their steady state: repetitions of programs that would go on as the last one did
are skipped.

Parts of a cluster that share no group and no HBM bank in the repeated programs go their own ways
until these end: copies of the state, for instance, of which one has a straggler. Each part is
watched for itself: when its state (`loop_state.py`) at the beginning of a repetition is that at the
beginning of the one before, it repeats for good, since the loop knows no absolute time; what lies
between is then added as often as repetitions are left, and the part goes on that much later. A part
that is still to meet another in a collective begun before the repetitions is not alone until that
is over: it skips nothing, for the other's clock would not go on with it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwright.compiler.neff.schedule import Schedule
from shardwright.sim_cluster.timing.actors import Actor, ClassResult, Job
from shardwright.sim_cluster.timing.classes import RankClasses
from shardwright.sim_cluster.timing.loop_state import loop_state

Event = tuple[int, int, Actor | Job, int]  # when, in order, whose, its version
Numbers = dict[Hashable, int]


@dataclass(frozen=True, slots=True)
class Repeats:
    """Program runs that repeat: how many come before, how many are one repetition, how often, and
    the mesh axes of the collectives in them."""

    head: int
    programs: int
    count: int
    axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule, axes_of: Callable[[str], Iterable[tuple[str, ...]]]) -> Repeats:
        """The longest repetition of a schedule; `axes_of` are those of a program by its name."""
        longest = max(range(len(schedule)), key=lambda entry: schedule[entry][1])
        names, count = schedule[longest]
        head = sum(len(programs) * times for programs, times in schedule[:longest])
        axes = sorted({axes for name in names for axes in axes_of(name)})
        return cls(head, len(names), count, tuple(axes))

    def begins(self, runs: int) -> bool:
        """Whether a class that has begun so many program runs is at the head of a repetition."""
        since = runs - self.head - 1
        return 0 <= since < self.programs * self.count and since % self.programs == 0

    def left(self, runs: int) -> int:
        """How many more repetitions such a class can go through and be in one still."""
        return max(0, self.head + self.programs * self.count - runs) // self.programs


def parts(classes: RankClasses, axes: Iterable[tuple[str, ...]]) -> list[frozenset[int]]:
    """Classes that meet, directly or through others, over `axes` or on HBM banks."""
    found: list[frozenset[int]] = []
    for index in range(classes.count):
        met = frozenset({index, *classes.mates(index)}).union(
            *(classes.groups[a][index] for a in axes)
        )
        disjoint = [part for part in found if not part & met]
        found = [*disjoint, met.union(*(part for part in found if part & met))]
    return found


@dataclass(frozen=True, slots=True)
class _Moment:
    """A part at the beginning of a repetition."""

    now: int
    state: object
    positions: tuple[int, ...]
    numbers: tuple[Numbers, ...]


class Steady:
    """Watches the parts of a cluster and skips what they would repeat."""

    def __init__(self, repeats: Repeats, classes: RankClasses, actors: Sequence[Actor]) -> None:
        self.repeats, self.actors = repeats, actors
        self.watched = {part: None for part in parts(classes, repeats.axes)}
        self.part_of = {index: part for part in self.watched for index in part}
        self.begun: Counter[tuple[frozenset[int], int]] = Counter()
        self.due: list[tuple[frozenset[int], int]] = []
        self.seen: dict[frozenset[int], _Moment] = {}
        self.skipped = 0  # repetitions, over all parts

    def begin(self, actor: Actor) -> None:
        """A class has begun another program run."""
        part = self.part_of[actor.index]
        if part in self.watched and self.repeats.begins(actor.runs):
            self.begun[part, actor.runs] += 1
            if self.begun[part, actor.runs] == len(part):
                self.due.append((part, actor.runs))

    def instant_over(self, events: list[Event], now: int) -> None:
        """All that happens at `now` has happened; `events` are changed in place where a part
        skips."""
        due, self.due = self.due, []
        for part, runs in due:
            moment = self._moment(part, runs, events, now)
            before = self.seen.get(part)
            self.seen[part] = moment
            if before and self._alone(part) and moment.state == before.state:
                self._skip(part, before, moment, events)

    def _alone(self, part: frozenset[int]) -> bool:
        """Whether nothing that a part has started is shared with classes outside of it."""
        queues = (queue for index in part for queue in self.actors[index].queues.values())
        return all(job.members <= part for queue in queues for job in queue)

    def _moment(
        self, part: frozenset[int], runs: int, events: Sequence[Event], now: int
    ) -> _Moment:
        own = [self.actors[index] for index in sorted(part)]
        pending = [
            (when, mover)
            for when, _, mover, version in sorted(events)
            if version == mover.version and not part.isdisjoint(mover.members)
        ]
        return _Moment(
            now,
            loop_state(own, pending, now, runs),
            tuple(actor.position for actor in own),
            tuple(_numbers(actor.result) for actor in own),
        )

    def _skip(
        self, part: frozenset[int], before: _Moment, here: _Moment, events: list[Event]
    ) -> None:
        """Add what lies between two moments as often as every class of the part can repeat it."""
        del self.watched[part]
        own = [self.actors[index] for index in sorted(part)]
        times = min(self.repeats.left(actor.runs) for actor in own)
        later = times * (here.now - before.now)
        self.skipped += times
        for number, actor in enumerate(own):
            places = times * (here.positions[number] - before.positions[number])
            actor.skip(places, later)
            more = _added(before.numbers[number], here.numbers[number])
            assert min(more.values()) >= 0, "a repetition takes something away"
            _extend(actor.result, {key: times * n for key, n in more.items()})
        for job in {job for actor in own for job in actor.active}:
            job.skip(later)
        events[:] = [
            (when if part.isdisjoint(mover.members) else when + later, order, mover, version)
            for when, order, mover, version in events
        ]
        heapq.heapify(events)


def _tables(result: ClassResult) -> Iterator[tuple[Hashable, dict[str, int]]]:
    """The picoseconds of a result by category, or engine, under names of their own."""
    yield from (("charged", result.charged_ps), ("busy", result.busy_ps), *result.placed_ps.items())


def _numbers(result: ClassResult) -> Numbers:
    """Everything that adds up in a result. Its end does not: it is that of the last thing done,
    and what comes after the repetitions is later than anything in them."""
    found: Numbers = {"lone": result.lone_ps}
    for name, table in _tables(result):
        found |= {(name, key): ps for key, ps in table.items()}
    for call, use in result.uses.items():
        found |= {
            (call, "count"): use.count,
            (call, "total"): use.total_ps,
            (call, "exposed"): use.exposed_ps,
        }
    return found


def _added(before: Numbers, after: Numbers) -> Numbers:
    """What is more in the second."""
    return {key: after[key] - before.get(key, 0) for key in after}


def _extend(result: ClassResult, more: Numbers) -> None:
    """Add to everything in a result."""
    result.lone_ps += more["lone"]
    for name, table in _tables(result):
        for key in table:
            table[key] += more[name, key]
    for call, use in result.uses.items():
        use.count += more[call, "count"]
        use.total_ps += more[call, "total"]
        use.exposed_ps += more[call, "exposed"]
