"""Steady micro-batches: what is multiplied is what would have been replayed."""

from __future__ import annotations

import pytest

from compiler.evaluate import Segment
from compiler.neff.schedule import Schedule
from sim_cluster.actors import ClassResult
from sim_cluster.classes import refine
from sim_cluster.faults import Health
from sim_cluster.macro import MacroOp, Stretch, schedule_macros
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
