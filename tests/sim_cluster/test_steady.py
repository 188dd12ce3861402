"""Steady micro-batches: what is multiplied is what would have been replayed."""

from __future__ import annotations

import pytest

from compiler.dtypes import DType
from compiler.evaluate import Segment
from compiler.isa.program import CollectiveCall
from compiler.neff.schedule import Schedule
from sim_cluster.actors import ClassResult, CollectiveDuration
from sim_cluster.classes import refine
from sim_cluster.contention import Demand
from sim_cluster.faults import Health
from sim_cluster.macro import MacroOp, Start, Stretch, Wait, schedule_macros
from sim_cluster.run_timing import ClusterLoop
from sim_cluster.steady import SAMPLED, steady_results
from tests.sim_cluster.test_timing_loop import AXES, MESH, duration, layer


def code(ps: int) -> Stretch:
    return Stretch(ps, 2 * ps, ps, Segment("compute", ps, busy_ps={"tensor": ps // 2}), "code")


PROGRAMS: dict[str, list[MacroOp]] = {
    "forward": [code(777), *layer()],
    "backward": [*layer(), code(1234), *layer()],
    "update": [code(99)],
}
SLOW = [1.0, 1.0, 1.3, 1.0, 1.0, 1.7, 1.0, 1.0]


class Runs:
    """The cluster loop for any schedule, which it remembers."""

    def __init__(self) -> None:
        self.seen: list[Schedule] = []
        self.classes = refine(MESH, AXES, SLOW)

    def __call__(self, schedule: Schedule) -> list[ClassResult]:
        self.seen.append(schedule)
        macros = [schedule_macros(PROGRAMS, schedule)] * self.classes.count
        slow = {c: SLOW[self.classes.representative(c)] for c in range(self.classes.count)}
        return ClusterLoop(self.classes, macros, duration, Health(slow=slow)).run()


def schedule_of(count: int) -> Schedule:
    return ((("forward", "backward"), count), (("update",), 1))


@pytest.mark.parametrize("count", [6, 7, 64])
def test_multiplied_is_replayed(count: int) -> None:
    runs = Runs()
    quick = steady_results(runs, schedule_of(count))
    assert [s[0][1] for s in runs.seen] == list(SAMPLED)
    for found, expected in zip(quick, Runs()(schedule_of(count)), strict=True):
        assert found.end_ps == expected.end_ps
        assert found.charged_ps == expected.charged_ps
        assert found.busy_ps == expected.busy_ps
        assert found.uses == expected.uses


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
    seen = []

    def price(call: CollectiveCall, members: frozenset[int]) -> CollectiveDuration:
        late = call is TP_GATHER and any(of[m] == "link" for m in members)
        return CollectiveDuration(5000 if late else 500, Demand(0.5), "", "", 1, 2)

    def run(schedule: Schedule) -> list[ClassResult]:
        seen.append(schedule[1][1])
        macros = [schedule_macros(CROSSING, schedule)] * classes.count
        return ClusterLoop(classes, macros, price, Health(slow=slow)).run()

    schedule = ((("gather",), 1), (("micro",), count), (("update",), 1))
    found, expected = steady_results(run, schedule), run(schedule)
    assert seen == [*SAMPLED, count, count]
    assert [r.end_ps for r in found] == [r.end_ps for r in expected]
    assert [r.charged_ps for r in found] == [r.charged_ps for r in expected]
    last = max(5000 + 1000 * count, 500 + 1100 * count)
    assert max(r.end_ps for r in found) == last + 500 + 500 + 109


def test_few_micro_batches_are_replayed() -> None:
    runs = Runs()
    steady_results(runs, schedule_of(SAMPLED[-1]))
    assert runs.seen == [schedule_of(SAMPLED[-1])]


def test_what_is_not_steady_is_replayed_in_full() -> None:
    def run(schedule: Schedule) -> list[ClassResult]:
        counts.append(schedule[0][1])
        return [ClassResult(end_ps=schedule[0][1] ** 2)]

    counts: list[int] = []
    (result,) = steady_results(run, schedule_of(20))
    assert (result.end_ps, counts) == (400, [*SAMPLED, 20])
