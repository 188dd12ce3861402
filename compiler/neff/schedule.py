"""The order of a step: what each pipeline stage runs, what stages send each other, and which parts
of a leaf they hold.

The step plan and the manifest of a bundle say it in the same words, so that the machine, which
never sees a graph, follows what partitioning decided. With one stage there are no transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STAGE_AXIS = "pp"
"""Stages of a pipeline lie along this mesh axis, the outermost one."""

Schedule = tuple[tuple[tuple[str, ...], int], ...]
"""Entries (programs, count): the programs run in order, `count` times. Run `k` of a program in a
step works on micro-batch `k`; `counted_as` says which programs are counted as one.
"""

_FIRST, _LAST = ".first", ".last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A named buffer that one pipeline stage makes and another reads.

    After run `k` of `writer` its `sent` goes from `source` to the same core of `target`, which has
    it as `received` before run `k` of `reader`, whose last runs may be programs of their own. With
    `once`, only the last run of `writer` in a step sends, and the first of `reader` receives.
    """

    sent: str
    received: str
    source: int
    target: int
    writer: str
    reader: str
    num_bytes: int
    once: bool = False


@dataclass(frozen=True, slots=True)
class LeafPart:
    """Which part of a leaf a buffer holds: from index `first` along `dim` of the leaf named
    `leaf`.
    """

    leaf: str
    dim: int
    first: int


class OfStages:
    """A buffer of the cores of some pipeline `stages` (empty: of all), with `slots` for as many
    micro-batches on each (empty: for one).
    """

    __slots__ = ()
    stages: tuple[int, ...]
    slots: tuple[int, ...]

    def on(self, stage: int) -> bool:
        """True when the cores of `stage` have the buffer."""
        return not self.stages or stage in self.stages

    def slots_on(self, stage: int) -> int:
        """How many micro-batches the cores of `stage` hold at a time."""
        return self.slots[self.stages.index(stage)] if self.slots else 1


def flat(schedule: Schedule) -> Iterator[str]:
    """The programs of a schedule, run by run."""
    return (name for names, count in schedule for _ in range(count) for name in names)


def first_of(name: str) -> str:
    """The program that runs in the place of program `name` for the first micro-batch."""
    return name + _FIRST


def last_of(name: str) -> str:
    """The program that runs in the place of program `name` for the last micro-batch."""
    return name + _LAST


def counted_as(name: str) -> str:
    """The program with whose runs those of program `name` are counted."""
    return name.removesuffix(_FIRST).removesuffix(_LAST)


def counted_runs(schedule: Schedule) -> Counter[str]:
    """How often each program runs in a step, with those that are counted as one together."""
    return Counter(map(counted_as, flat(schedule)))


def folded(names: Sequence[str]) -> Schedule:
    """Runs in order as entries: repeated programs, and repeated pairs, once with a count."""
    entries: list[tuple[tuple[str, ...], int]] = []
    at = 0
    while at < len(names):
        size, count = max(((n, _repeats(names, at, n)) for n in (1, 2)), key=_covered)
        entries.append((tuple(names[at : at + size]), count))
        at += size * count
    return tuple(entries)


def _covered(entry: tuple[int, int]) -> tuple[int, int]:
    """Runs an entry covers, when it repeats at all; the shorter among equals."""
    size, count = entry
    return (size * count if count > 1 or size == 1 else 0, -size)


def _repeats(names: Sequence[str], at: int, size: int) -> int:
    """How often the `size` names at `at` follow each other."""
    count = 1
    while names[at : at + size] == names[at + count * size : at + (count + 1) * size]:
        count += 1
    return count


def run_counts(schedule: Schedule) -> Counter[str]:
    """How often each program runs in a step."""
    counts: Counter[str] = Counter()
    for names, count in schedule:
        for name in names:
            counts[name] += count
    return counts
