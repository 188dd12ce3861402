"""Micro-batches in their steady state: a schedule that repeats its programs often is replayed with
a few repetitions, and what one more adds is multiplied.

That is done only where the state of the whole loop (`loop_state.py`) repeats from one repetition to
the next while no class has left the repetitions: the loop knows no absolute time, so that it then
repeats for good. Equal increments would not show it: classes that advance at different rates may
change who is last at the end. Such a schedule is replayed in full. Spans for traces end with the
repetitions that were replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise

from compiler.neff.schedule import Schedule
from sim_cluster.actors import ClassResult

SAMPLED = (4, 5)
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
    before, after = (run(_repeated(schedule, longest, count)) for count in SAMPLED)
    if not _repeats(after, schedule, longest):
        return run(schedule)
    found = []
    for result, fewer in zip(after, before, strict=True):
        added = _added(_numbers(fewer), _numbers(result))
        assert min(added.values()) >= 0, "a repetition takes something away"
        found.append(_extended(result, {key: more * n for key, n in added.items()}))
    return found


def _repeats(results: list[ClassResult], schedule: Schedule, entry: int) -> bool:
    """Whether the loop was in one state at the beginning of two repetitions, before any class was
    through with the last one: what lies between is then what any further repetition adds.
    """
    states = results[0].states
    programs, _ = schedule[entry]
    head = sum(len(names) * count for names, count in schedule[:entry])
    end = head + SAMPLED[-1] * len(programs)
    begun = [head + 1 + n * len(programs) for n in range(1, SAMPLED[-1])]
    found = [states[runs] for runs in begun if runs in states and states[runs].furthest <= end]
    return any(b.repeats(a) for a, b in pairwise(found))


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
