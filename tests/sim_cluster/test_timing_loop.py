"""The cluster loop: exact charging, folding against unfolded ranks, contention, and loud
deadlocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.collectives.ops import ReplicaGroups
from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.timing.evaluate import Segment
from shardwright.sim_cluster.timing.classes import RankClasses, refine
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.faults import Health
from shardwright.sim_cluster.timing.macro import MacroOp, Start, Stretch, Wait
from shardwright.sim_cluster.timing.run_timing import ClassResult, ClusterLoop, CollectiveDuration

GATHER = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
REDUCE = CollectiveCall("all_reduce", ("tp",), DType.F32, (1, 1, 64), "add", 1)
MESH = {"dp": 4, "tp": 2}
AXES = [("dp",), ("tp",)]


def stretch(ps: int, compute: int = 0, half: int = 0) -> Stretch:
    return Stretch(ps, half or ps, compute, Segment("compute", ps), "f")


def duration(call: CollectiveCall, _: frozenset[int]) -> CollectiveDuration:
    return CollectiveDuration(
        500 if call is GATHER else 300, Demand(0.5), "ring", "only one", 128, 4
    )


def layer() -> list[MacroOp]:
    return [
        Start(GATHER, 0),
        stretch(200, 150),
        Wait(0),
        stretch(900, 700),
        Start(REDUCE, 1),
        stretch(400, 100),
        Wait(1),
    ]


def run(classes: RankClasses, macros: list[MacroOp], slow: dict[int, float]) -> list[ClassResult]:
    return ClusterLoop(classes, [macros] * classes.count, duration, Health(slow=slow)).run()


def unfolded() -> RankClasses:
    """Every rank its own class."""
    ranks = 8
    groups = {}
    for axes in AXES:
        met = {}
        for group in ReplicaGroups.from_axes(MESH, axes).groups:
            met.update(dict.fromkeys(group, frozenset(group)))
        groups[tuple(axes)] = tuple(met[r] for r in range(ranks))
    return RankClasses(tuple(range(ranks)), groups)


def test_a_step_is_charged_to_the_picosecond() -> None:
    classes = refine(MESH, AXES, [0] * 8)
    assert classes.count == 1
    (result,) = run(classes, layer() * 3, {})
    assert sum(result.charged_ps.values()) == result.end_ps == 3 * (500 + 900 + 400)
    assert result.charged_ps["collective_dp"] == 3 * 300
    assert "collective_tp" not in result.charged_ps
    assert result.uses[GATHER].exposed_ps == 900
    assert result.uses[REDUCE].exposed_ps == 0


@pytest.mark.parametrize("slow", [(), (0,), (5,), (1, 6)])
def test_folded_classes_give_every_rank_its_unfolded_time(slow: tuple[int, ...]) -> None:
    colours = [1.3 if r in slow else 1.0 for r in range(8)]
    classes = refine(MESH, AXES, colours)
    speeds = {c: colours[classes.representative(c)] for c in range(classes.count)}
    folded = run(classes, layer() * 5, speeds)
    full = run(unfolded(), layer() * 5, dict(enumerate(colours)))
    assert classes.count < 8
    for rank in range(8):
        got, want = folded[classes.of_rank[rank]], full[rank]
        assert got.end_ps == want.end_ps
        assert got.charged_ps == want.charged_ps


def test_compute_slows_down_while_a_collective_takes_dma_engines() -> None:
    classes = refine(MESH, AXES, [0] * 8)
    macros: list[MacroOp] = [Start(GATHER, 0), stretch(1000, 0, half=2000), Wait(0)]
    (result,) = run(classes, macros, {})
    # 500 ps at half rate do 250 ps of work; the other 750 ps run at full rate.
    assert result.end_ps == 500 + 750


def test_a_collective_that_not_all_ranks_start_is_an_error_not_a_hang() -> None:
    classes = refine(MESH, AXES, [r == 3 for r in range(8)])
    macros = [[stretch(10)] if c == classes.of_rank[3] else layer() for c in range(classes.count)]
    with pytest.raises(SimulationError, match="SW_TIME_DEADLOCK"):
        ClusterLoop(classes, macros, duration).run()


def test_parts_of_an_axis_are_charged_to_the_axis() -> None:
    mesh = {"dp": 4, "tp_0": 2, "tp_1": 2}
    both = replace(GATHER, axes=("tp_0", "tp_1"))
    one = replace(GATHER, axes=("tp_1",))
    classes = refine(mesh, [both.axes, one.axes], [0] * 16)
    macros: list[MacroOp] = [Start(both, 0), Wait(0), Start(one, 0), Wait(0)]
    whole = {"tp_0": "tp", "tp_1": "tp"}
    (result,) = ClusterLoop(classes, [macros], duration, whole_axes=whole).run()
    assert result.charged_ps == {"collective_tp": 2 * 300}
