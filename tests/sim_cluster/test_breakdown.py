"""What every picosecond of a core is charged to: compute before memory, both before the collective
they hide, that before idle; and what a step says of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.timing.evaluate import Segment
from shardwright.sim_cluster.timing.actors import ClassResult, CollectiveDuration, CollectiveUse
from shardwright.sim_cluster.timing.classes import refine
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.faults import Health
from shardwright.sim_cluster.timing.macro import MacroOp, Start, Stretch, Wait
from shardwright.sim_cluster.timing.run_timing import ClusterLoop, axis_category
from shardwright.sim_cluster.timing.step_time import _breakdown, _replayed

GATHER = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
REDUCE = CollectiveCall("all_reduce", ("tp",), DType.F32, (1, 1, 64), "add", 1)


def stretch(ps: int, compute: int, charge: str = "") -> Stretch:
    return Stretch(ps, ps, compute, Segment("compute", ps), "f", charge)


def charged(*macros: MacroOp, slow: float = 1.0) -> tuple[dict[str, int], int]:
    """What is charged, and when it ends; the gather takes 500 ps and nothing of the core."""
    classes = refine({"dp": 4}, [("dp",)], [0] * 4)
    cost = CollectiveDuration(500, Demand(0.0), "ring", "only one", 128, 4)
    loop = ClusterLoop(classes, [list(macros)], lambda *_: cost, Health(slow={0: slow}))
    (result,) = loop.run()
    return result.charged_ps, result.end_ps


def test_time_without_a_compute_engine_is_memory() -> None:
    """1000 ps of which engines compute 700."""
    assert charged(stretch(1000, 700)) == ({"compute": 700, "memory": 300}, 1000)
    assert charged(stretch(1000, 1000)) == ({"compute": 1000}, 1000)


def test_a_slow_core_computes_longer() -> None:
    """1.5 times of both."""
    assert charged(stretch(1000, 700), slow=1.5) == ({"compute": 1050, "memory": 450}, 1500)


def test_launches_are_charged_whole() -> None:
    assert charged(stretch(90, 40, "launch"), stretch(10, 10)) == (
        {"launch": 90, "compute": 10},
        100,
    )


def test_a_collective_is_charged_where_the_core_waits_for_it() -> None:
    """500 ps behind 200 of compute and memory: 300 are left, behind 600 nothing."""
    assert charged(Start(GATHER, 0), stretch(200, 150), Wait(0), stretch(100, 100)) == (
        {"compute": 250, "memory": 50, "collective_dp": 300},
        600,
    )
    assert charged(Start(GATHER, 0), stretch(600, 150), Wait(0)) == (
        {"compute": 150, "memory": 450},
        600,
    )


def test_the_category_of_a_collective_names_whole_axes_once() -> None:
    both = replace(GATHER, axes=("dp_0", "dp_1", "tp"))
    assert axis_category(both, {"dp_0": "dp", "dp_1": "dp"}) == "collective_dp_tp"
    assert axis_category(both, {}) == "collective_dp_0_dp_1_tp"


def result(end_ps: int, **spent: int) -> ClassResult:
    return ClassResult(end_ps=end_ps, charged_ps=spent, busy_ps={"tensor": end_ps // 2}, lone_ps=3)


NOTHING = {"compute": 0, "memory": 0, "bubble": 0, "launch": 0, "idle": 0}


def test_what_is_left_of_the_step_is_idle() -> None:
    """Charged 75 of 100 ps, 5 of them idle already."""
    found = _breakdown(result(75, compute=50, collective_tp=20, idle=5), 100)
    assert found == NOTHING | {"compute": 50, "collective_tp": 20, "idle": 30}
    assert sum(found.values()) == 100


STEP: Any = SimpleNamespace(whole_axes={})


def test_a_stage_is_its_last_core() -> None:
    results = [result(60, compute=60), result(80, memory=80), result(70, bubble=70)]
    classes: Any = SimpleNamespace(count=3)
    found = _replayed("peak", STEP, 1, {}, classes, [0, 0, 1], results)
    assert found.stages_ps == (
        NOTHING | {"memory": 80},
        NOTHING | {"bubble": 70, "idle": 10},
    )


def test_a_step_is_its_last_core() -> None:
    """Uses of collectives are those of that core, the longest first; what of them no core waits for
    is hidden: 30 - 10 over dp, 50 - 50 over tp."""

    def use(call: CollectiveCall, total_ps: int, exposed_ps: int) -> CollectiveUse:
        cost = CollectiveDuration(1, Demand(0.0), "ring", "only one", 128, 4)
        return CollectiveUse(call, cost, 1, total_ps, exposed_ps)

    last = replace(
        result(90, compute=30, collective_dp=10, collective_tp=50),
        uses={GATHER: use(GATHER, 30, 10), REDUCE: use(REDUCE, 50, 50)},
    )
    other = replace(result(60, compute=60), uses={GATHER: use(GATHER, 30, 30)})
    classes: Any = SimpleNamespace(count=2)
    found = _replayed("peak", STEP, 1, {}, classes, [0, 0], [other, last])
    assert (found.profile, found.step_time_ps, found.rank_classes) == ("peak", 90, 2)
    assert found.breakdown_ps == NOTHING | {
        "compute": 30,
        "collective_dp": 10,
        "collective_tp": 50,
    }
    assert found.hidden_ps == {"collective_dp": 20, "collective_tp": 0}
    assert [one.call for one in found.collectives] == [REDUCE, GATHER]
    assert (found.engines_ps, found.lone_ps) == ({"tensor": 45}, 3)
    assert found.last is last and found.last_of(0) is last


@pytest.mark.parametrize("late", [0, 40])
def test_waiting_for_another_stage_is_bubble(late: int) -> None:
    """A meeting of stages: until the other one comes to it bubble, then 500 ps of transfer."""
    call = replace(REDUCE, axes=("pp",))
    classes = refine({"pp": 2}, [("pp",)], [0, 1])
    first: list[MacroOp] = [Start(call, 0), Wait(0)]
    second: list[MacroOp] = [stretch(late, late), *first] if late else first
    cost = CollectiveDuration(500, Demand(0.0), "ring", "only one", 128, 2)
    early, other = ClusterLoop(classes, [first, second], lambda *_: cost, stage_stride=1).run()
    bubble = {"bubble": late} if late else {}
    compute = {"compute": late} if late else {}
    assert early.charged_ps == bubble | {"collective_pp": 500}
    assert other.charged_ps == compute | {"collective_pp": 500}
