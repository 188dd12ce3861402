"""Micro-batches in their steady state: a schedule that repeats its programs often is replayed with
a few repetitions, and what one more adds is multiplied.

That is done only where three counts in a row show that one more repetition adds the same to every
number of every class of ranks, to the picosecond; the loop knows no absolute time, so that what
repeats once in the same relative state repeats for good. Spans for traces end with the repetitions
that were replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise

from compiler.neff.schedule import Schedule
from sim_cluster.actors import ClassResult

SAMPLED = (3, 4, 5)
"""Repetitions that are replayed."""

Numbers = dict[Hashable, int]


def steady_results(
    run: Callable[[Schedule], list[ClassResult]], schedule: Schedule
) -> list[ClassResult]:
    """What `run` gives for a schedule of one pipeline stage, per class."""
    longest = max(range(len(schedule)), key=lambda entry: schedule[entry][1])
    more = schedule[longest][1] - SAMPLED[-1]
    if more <= 0:
        return run(schedule)
    few = [run(_repeated(schedule, longest, count)) for count in SAMPLED]
    found = []
    for results in zip(*few, strict=True):
        numbers = [_numbers(result) for result in results]
        first, second = (_added(a, b) for a, b in pairwise(numbers))
        if first != second:
            return run(schedule)
        found.append(_extended(results[-1], {key: more * n for key, n in second.items()}))
    return found


def _repeated(schedule: Schedule, entry: int, count: int) -> Schedule:
    """A schedule with another count of one entry."""
    programs, _ = schedule[entry]
    return (*schedule[:entry], (programs, count), *schedule[entry + 1 :])


def _numbers(result: ClassResult) -> Numbers:
    """Everything that adds up in a result."""
    found: Numbers = {"end": result.end_ps, "lone": result.lone_ps}
    found |= {("charged", k): ps for k, ps in result.charged_ps.items()}
    found |= {("busy", k): ps for k, ps in result.busy_ps.items()}
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


def _extended(result: ClassResult, more: Numbers) -> ClassResult:
    """A result with more of everything."""
    return replace(
        result,
        end_ps=result.end_ps + more["end"],
        lone_ps=result.lone_ps + more["lone"],
        charged_ps={k: ps + more["charged", k] for k, ps in result.charged_ps.items()},
        busy_ps={k: ps + more["busy", k] for k, ps in result.busy_ps.items()},
        uses={
            call: replace(
                use,
                count=use.count + more[call, "count"],
                total_ps=use.total_ps + more[call, "total"],
                exposed_ps=use.exposed_ps + more[call, "exposed"],
            )
            for call, use in result.uses.items()
        },
    )
