"""Steady micro-batches: what is skipped is what would have been replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.neff.schedule import Schedule
from shardwright.compiler.timing.evaluate import KernelTime, Segment
from shardwright.sim_cluster.timing.actors import (
    Actor,
    ClassResult,
    CollectiveDuration,
    Job,
    Span,
)
from shardwright.sim_cluster.timing.classes import RankClasses, refine
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.faults import Health
from shardwright.sim_cluster.timing.macro import MacroOp, Start, Stretch, Wait, schedule_macros
from shardwright.sim_cluster.timing.run_timing import ClusterLoop
from shardwright.sim_cluster.timing.steady import Event, Repeats, Steady, parts
from tests.sim_cluster.test_timing_loop import AXES, MESH, duration, layer


def code(ps: int) -> Stretch:
    kernel = KernelTime("r", ps, {}, ps, 0, lone_ps=ps // 3)
    segment = Segment("compute", ps, busy_ps={"tensor": ps // 2}, kernels=(kernel,))
    return Stretch(ps, 2 * ps, ps, segment, "code")


PROGRAMS: dict[str, list[MacroOp]] = {
    "forward": [code(777), *layer()],
    "backward": [*layer(), code(1234), *layer()],
    "update": [code(99)],
}
SLOW = [1.0, 1.0, 1.3, 1.0, 1.0, 1.7, 1.0, 1.0]


def axes_in(programs: dict[str, list[MacroOp]], name: str) -> set[tuple[str, ...]]:
    return {op.call.axes for op in programs[name] if isinstance(op, Start)}


def apart(spans: list[Span]) -> list[Span]:
    """All but those of the core itself, of which neighbours become one."""
    return [span for span in spans if span.lane != "core"]


def both_ways(
    programs: dict[str, list[MacroOp]],
    schedule: Schedule,
    classes: RankClasses,
    price: Callable[[CollectiveCall, frozenset[int]], CollectiveDuration],
    slow: dict[int, float],
) -> tuple[list[ClassResult], ClusterLoop]:
    """A schedule replayed in full, and the loop that skipped what repeats, which says the same, and
    draws a part of it: the last two program runs, and what else happens meanwhile, at least."""
    macros = [schedule_macros(programs, schedule)] * classes.count
    full = ClusterLoop(classes, macros, price, Health(slow=slow)).run()
    repeats = Repeats.of(schedule, lambda name: axes_in(programs, name))
    loop = ClusterLoop(classes, macros, price, Health(slow=slow), repeats=repeats)
    for found, expected in zip(loop.run(), full, strict=True):
        assert found.end_ps == expected.end_ps
        assert found.charged_ps == expected.charged_ps
        assert found.busy_ps == expected.busy_ps
        assert found.lone_ps == expected.lone_ps
        assert found.placed_ps == expected.placed_ps
        assert found.uses == expected.uses
        drawn, whole = (apart(result.spans) for result in (found, expected))
        last = [span for span in whole if span.lane == "program"][-2:]
        assert all(span in whole for span in drawn)
        assert all(span in drawn for span in whole if span.end_ps > last[0].start_ps)
    return full, loop


def skipped(loop: ClusterLoop) -> int:
    assert loop.steady is not None
    return loop.steady.skipped


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 64])
def test_skipped_is_replayed(count: int) -> None:
    classes = refine(MESH, AXES, SLOW)
    slow = {c: SLOW[classes.representative(c)] for c in range(classes.count)}
    schedule = ((("forward", "backward"), count), (("update",), 1))
    _, loop = both_ways(PROGRAMS, schedule, classes, duration, slow)
    assert skipped(loop) >= count - 5
    assert len(loop.jobs) == len({id(job) for job in loop.jobs.values()})


TP_GATHER = CollectiveCall("all_gather", ("tp",), DType.F32, (1, 8, 4))
DP_REDUCE = CollectiveCall("all_reduce", ("dp",), DType.F32, (1, 1, 64), "add", 1)
TP_REDUCE = CollectiveCall("all_reduce", ("tp",), DType.F32, (1, 1, 64), "add", 1)
CROSSING: dict[str, list[MacroOp]] = {
    "gather": [Start(TP_GATHER, 0), Wait(0)],
    "micro": [code(1000)],
    "update": [Start(DP_REDUCE, 0), Wait(0), Start(TP_REDUCE, 1), Wait(1), code(99)],
}


@pytest.mark.parametrize("count", [32, 200])
def test_classes_that_advance_at_different_rates_change_who_is_last(count: int) -> None:
    """A gather over a slow link makes ranks 0 and 1 late by 4500 at the start, core 6 loses 100 per
    micro-batch: few micro-batches wait for the link, many for the core."""
    colours = ["link" if rank in (0, 1) else "slow" if rank == 6 else "" for rank in range(8)]
    classes = refine(MESH, AXES, colours)
    of = [colours[classes.representative(c)] for c in range(classes.count)]
    slow = {c: 1.1 for c, colour in enumerate(of) if colour == "slow"}

    def price(call: CollectiveCall, members: frozenset[int]) -> CollectiveDuration:
        late = call is TP_GATHER and any(of[m] == "link" for m in members)
        return CollectiveDuration(5000 if late else 500, Demand(0.5), "", "", 1, 2)

    schedule = ((("gather",), 1), (("micro",), count), (("update",), 1))
    full, loop = both_ways(CROSSING, schedule, classes, price, slow)
    last = max(5000 + 1000 * count, 500 + 1100 * count)
    assert max(r.end_ps for r in full) == last + 500 + 500 + 109
    assert skipped(loop) >= classes.count * (count - 4)


def test_copies_of_the_state_skip_for_themselves() -> None:
    """Copies meet in the update alone; one of them has a straggler, and collectives of the last
    micro-batch are in flight where it ends."""
    mesh = {"rep": 2, "dp": 4}
    gather = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
    scatter = CollectiveCall("reduce_scatter", ("dp",), DType.F32, (1, 1, 64), "add", 1)
    total = CollectiveCall("all_reduce", ("rep",), DType.F32, (1, 1, 64), "add")
    programs: dict[str, list[MacroOp]] = {
        "micro": [Start(gather, 0), code(777), Wait(0), code(1000), Start(scatter, 1), code(300)],
        "update": [Start(total, 0), Wait(0), code(99)],
    }
    colours = [1.3 if rank == 5 else 1.0 for rank in range(8)]
    classes = refine(mesh, [("rep",), ("dp",)], colours, [rank // 2 for rank in range(8)])
    slow = {c: colours[classes.representative(c)] for c in range(classes.count)}
    count = 50
    schedule = ((("micro",), count), (("update",), 1))

    def price(call: CollectiveCall, _: frozenset[int]) -> CollectiveDuration:
        return CollectiveDuration(900 if call is scatter else 500, Demand(0.4), "", "", 1, 2)

    _, loop = both_ways(programs, schedule, classes, price, slow)
    assert len(parts(classes, [("dp",)])) == 2
    assert skipped(loop) >= 2 * (count - 6)


def early_total(total_ps: int) -> ClusterLoop:
    """Two copies of the state, the second 2.5 times as slow, that start a collective over both of
    them in the head and await it in the update."""
    total = CollectiveCall("all_reduce", ("rep",), DType.F32, (1, 1, 64), "add", 1)
    gather = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
    programs: dict[str, list[MacroOp]] = {
        "head": [code(9000), Start(total, 0)],
        "micro": [Start(gather, 0), code(1000), Wait(0)],
        "update": [Wait(0), code(99)],
    }
    colours = [0, 0, 1, 1]
    classes = refine({"rep": 2, "dp": 2}, [("rep",), ("dp",)], colours)
    slow = {c: 1 + 1.5 * colours[classes.representative(c)] for c in range(classes.count)}

    def price(call: CollectiveCall, _: frozenset[int]) -> CollectiveDuration:
        return CollectiveDuration(total_ps if call is total else 950, Demand(0.45), "", "", 1, 2)

    schedule = ((("head",), 1), (("micro",), 60), (("update",), 1))
    assert len(parts(classes, [("dp",)])) == 2
    return both_ways(programs, schedule, classes, price, slow)[1]


@pytest.mark.parametrize(("total_ps", "least"), [(20_000, 60), (60_000, 20), (10**6, 0)])
def test_copies_that_still_have_to_meet_do_not_skip(total_ps: int, least: int) -> None:
    """The sooner they have met, the more each of them skips after it."""
    assert skipped(early_total(total_ps)) >= least


def test_what_never_repeats_is_replayed_in_full() -> None:
    """Classes of one part that drift apart: nothing is skipped, and nothing is wrong."""
    classes = refine(MESH, AXES, [0, 0, 0, 0, 0, 0, 1, 0])
    slow = {c: 1.1 if classes.representative(c) == 6 else 1.0 for c in range(classes.count)}
    programs = {**CROSSING, "micro": [code(1000)]}
    schedule = ((("micro",), 20), (("update",), 1))
    macros = [schedule_macros(programs, schedule)] * classes.count
    full = ClusterLoop(classes, macros, duration, Health(slow=slow)).run()
    together = Repeats(0, 1, 20, (("dp",), ("tp",)))  # as if they met in every micro-batch
    loop = ClusterLoop(classes, macros, duration, Health(slow=slow), repeats=together)
    assert [r.end_ps for r in loop.run()] == [r.end_ps for r in full]
    assert skipped(loop) == 0


def test_where_a_repetition_begins_and_how_many_are_left() -> None:
    """A run before, then three times two. From the first head on two more can be gone through, from
    the last none."""
    repeats = Repeats(1, 2, 3, ())
    assert [runs for runs in range(10) if repeats.begins(runs)] == [2, 4, 6]
    assert [repeats.left(runs) for runs in (2, 4, 6, 7, 8)] == [2, 1, 0, 0, 0]


def test_what_comes_before_the_longest_repetition() -> None:
    """Two programs three times and one once are seven runs in front of four times two."""
    schedule: Schedule = ((("a", "b"), 3), (("c",), 1), (("d", "e"), 4), (("f",), 2))
    axes = {"d": [("tp",), ("dp",)], "e": [("dp",)]}
    found = Repeats.of(schedule, lambda name: axes[name])
    assert found == Repeats(7, 2, 4, (("dp",), ("tp",)))
    begins = [runs for runs in range(20) if found.begins(runs)]
    assert begins == [8, 10, 12, 14]
    assert [found.left(runs) for runs in (8, 10, 12, 14, 15, 16)] == [3, 2, 1, 0, 0, 0]
    last: Schedule = ((("a",), 1), (("b",), 4))
    alone = Repeats.of(last, lambda name: ())
    assert alone == Repeats(1, 1, 4, ())
    assert [runs for runs in range(8) if alone.begins(runs)] == [2, 3, 4, 5]
    assert [alone.left(runs) for runs in (2, 4, 5, 6, 9)] == [3, 1, 0, 0, 0]


def test_events_that_hold_no_more_are_in_no_state() -> None:
    """Of two classes with a collective in flight: what was said at an earlier rate, and what
    belongs to another part. What holds is in it, at its time from now, in order."""
    classes = refine({"dp": 4}, [("dp",)], [0, 1, 2, 3])
    actors = [Actor(n, [code(100)]) for n in range(4)]
    for actor in actors:
        actor.version = 3
    steady = Steady(Repeats(0, 1, 5, ()), classes, actors)
    cost = CollectiveDuration(100, Demand(0.0), "ring", "", 64, 2)
    call = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 4, 1))
    job = Job(call, cost, frozenset((0, 1)), 0)
    job.version = 8
    part = frozenset((0, 1))
    holds: list[Event] = [(700, 5, actors[0], 3), (700, 4, actors[1], 3), (600, 6, job, 8)]
    stale: list[Event] = [(650, 1, actors[0], 2), (640, 2, job, 7), (610, 3, actors[2], 3)]
    want = steady._moment(part, 1, sorted(holds), 500)
    assert steady._moment(part, 1, stale + holds, 500) == want
    assert (want.now, want.positions) == (500, (0, 0))
    for event in holds:
        left = [one for one in holds if one is not event]
        assert steady._moment(part, 1, left, 500).state != want.state
    later = [(when + 70, *rest) for when, *rest in holds]
    assert steady._moment(part, 1, later, 500).state != want.state


def test_classes_on_one_bank_are_one_part() -> None:
    """Of four ranks that meet nobody, colours apart: 0 with 1 on a bank, 2 with 3; what meets over
    an axis is one part through others too."""
    alone = refine({"dp": 4}, [], range(4))
    assert parts(alone, []) == [frozenset({n}) for n in range(4)]
    banked = refine({"dp": 4}, [], range(4), [0, 0, 1, 1])
    assert parts(banked, []) == [frozenset({0, 1}), frozenset({2, 3})]
    mesh = {"dp": 2, "tp": 2}
    met = refine(mesh, [("dp",), ("tp",)], range(4))
    assert set(parts(met, [("dp",)])) == {frozenset({0, 2}), frozenset({1, 3})}
    assert parts(met, [("dp",), ("tp",)]) == [frozenset(range(4))]
