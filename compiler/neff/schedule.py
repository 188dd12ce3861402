"""The order of a step: what each pipeline stage runs, what stages send each other, and which parts
of a leaf they hold.

The step plan and the manifest of a bundle say it in the same words, so that the machine, which
never sees a graph, follows what partitioning decided. With one stage there are no transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

STAGE_AXIS = "pp"
"""Stages of a pipeline lie along this mesh axis, the outermost one."""

Schedule = tuple[tuple[tuple[str, ...], int], ...]
"""Entries (programs, count): the programs run in order, `count` times. Run `k` of a program in a
step works on micro-batch `k`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A named buffer that one pipeline stage makes and another reads.

    After run `k` of `writer` its `sent` goes from `source` to the same core of `target`, which has
    it as `received` before run `k` of `reader`. With `once`, only the last run of `writer` in a
    step sends, and the first of `reader` receives.
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


def flat(schedule: Schedule) -> Iterator[str]:
    """The programs of a schedule, run by run."""
    return (name for names, count in schedule for _ in range(count) for name in names)


def run_counts(schedule: Schedule) -> Counter[str]:
    """How often each program runs in a step."""
    counts: Counter[str] = Counter()
    for names, count in schedule:
        for name in names:
            counts[name] += count
    return counts
