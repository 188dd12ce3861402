"""Pipelines in time: bubbles are what the schedules of the literature say, messages overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.neff.schedule import Schedule, Transfer
from shardwright.compiler.timing.evaluate import Segment
from shardwright.sharding.cut.pipeline.schedules import stage_schedules
from shardwright.sim_cluster.timing.classes import refine
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.macro import (
    Receive,
    Send,
    Start,
    Stretch,
    Wait,
    schedule_macros,
)
from shardwright.sim_cluster.timing.run_timing import ClassResult, ClusterLoop, CollectiveDuration
from shardwright.sim_cluster.values.exchange import exchange
from shardwright.sim_cluster.values.functions import CollectiveRequest

FORWARD_PS, BACKWARD_PS = 100, 200


def stretch(ps: int, label: str) -> Stretch:
    return Stretch(ps, ps, ps, Segment("compute", ps), label)


def neighbours(parts: int, stages: int) -> list[Transfer]:
    """An activation to the next part, a gradient back."""

    def sent(kind: str, a: int, b: int) -> Transfer:
        name = f"{kind}/{a}"
        return Transfer(
            sent=name,
            received=name,
            source=a % stages,
            target=b % stages,
            writer=f"{kind}.{a}",
            reader=f"{kind}.{b}",
            num_bytes=8,
        )

    pairs = [(k, k + 1) for k in range(parts - 1)]
    return [sent("forward", a, b) for a, b in pairs] + [sent("backward", b, a) for a, b in pairs]


def simulate(
    schedules: Sequence[Schedule],
    transfers: Sequence[Transfer],
    parts: int,
    message_ps: int = 0,
    ranks: int = 2,
) -> list[ClassResult]:
    """The cluster loop on stages of `ranks` equal ranks, one class each."""
    stages = len(schedules)
    macros = {f"update.{s}": (stretch(0, "update"),) for s in range(stages)}
    for part in range(parts):
        macros[f"forward.{part}"] = (stretch(FORWARD_PS * stages // parts, "forward"),)
        macros[f"backward.{part}"] = (stretch(BACKWARD_PS * stages // parts, "backward"),)

    def duration(call: CollectiveCall, _: frozenset[int]) -> CollectiveDuration:
        return CollectiveDuration(message_ps, Demand(0.0), "direct", "", 8, stages)

    mesh = {"pp": stages, "tp": ranks}
    classes = refine(mesh, [("pp",), ("tp",)], [r // ranks for r in range(stages * ranks)])
    assert classes.count == stages
    programs = [schedule_macros(macros, s, transfers, n) for n, s in enumerate(schedules)]
    return ClusterLoop(classes, programs, duration, stage_stride=ranks).run()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 32)])
def test_bubble_of_equal_stages(name: str, stages: int, count: int) -> None:
    """(p - 1) / (m + p - 1) of the step; Huang et al. 2019, Narayanan et al. 2021."""
    schedules = stage_schedules(name, stages, stages, count)
    results = simulate(schedules, neighbours(stages, stages), stages)
    step_ps = max(r.end_ps for r in results)
    assert step_ps == (count + stages - 1) * (FORWARD_PS + BACKWARD_PS)
    last = max(results, key=lambda r: r.end_ps)
    bubble = last.charged_ps["bubble"] / step_ps
    assert bubble == pytest.approx((stages - 1) / (count + stages - 1))
    assert all(r.charged_ps["compute"] == count * (FORWARD_PS + BACKWARD_PS) for r in results)


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaved_parts_divide_the_bubble(chunks: int) -> None:
    """Narayanan et al. 2021, section 2.2: the bubble is `chunks` times smaller."""
    stages, count = 4, 8
    parts = stages * chunks
    schedules = stage_schedules("interleaved", stages, parts, count)
    results = simulate(schedules, neighbours(parts, stages), parts)
    step_ps = max(r.end_ps for r in results)
    work_ps = count * (FORWARD_PS + BACKWARD_PS)
    assert step_ps - work_ps == (stages - 1) * (FORWARD_PS + BACKWARD_PS) // chunks


def test_messages_are_charged_apart_from_the_bubble() -> None:
    """Two stages, one micro-batch: the first waits for the second, then for the gradient."""
    schedules = stage_schedules("1f1b", 2, 2, 1)
    first, second = simulate(schedules, neighbours(2, 2), 2, message_ps=7)
    work_ps = FORWARD_PS + BACKWARD_PS
    assert first.charged_ps == {"compute": work_ps, "bubble": 7 + work_ps, "collective_pp": 7}
    assert second.charged_ps == {"compute": work_ps, "bubble": FORWARD_PS, "collective_pp": 7}
    assert first.end_ps == 2 * work_ps + 14


def test_a_message_travels_while_its_sender_computes() -> None:
    """The sender goes on at once: only the fill of the pipeline sees the network."""
    schedules = stage_schedules("gpipe", 2, 2, 4)
    results = simulate(schedules, neighbours(2, 2), 2, message_ps=50)
    assert max(r.end_ps for r in results) == 5 * (FORWARD_PS + BACKWARD_PS) + 2 * 50


def test_a_message_nobody_sends_is_a_deadlock() -> None:
    schedules = stage_schedules("1f1b", 2, 2, 2)
    transfers = neighbours(2, 2)
    lost = [t for t in transfers if t.writer != "backward.1"]
    with pytest.raises(SimulationError, match="SW_TIME_DEADLOCK"):
        _with_lost_send(schedules, transfers, lost)


def _with_lost_send(
    schedules: Sequence[Schedule], transfers: Sequence[Transfer], lost: Sequence[Transfer]
) -> None:
    """Stage 0 expects everything, stage 1 sends only what is not lost."""
    macros = {name: (stretch(1, name),) for s in schedules for names, _ in s for name in names}
    classes = refine({"pp": 2}, [("pp",)], [0, 1])
    programs = [
        schedule_macros(macros, schedules[0], transfers, 0),
        schedule_macros(macros, schedules[1], lost, 1),
    ]
    ClusterLoop(
        classes,
        programs,
        lambda call, _: CollectiveDuration(0, Demand(0.0), "direct", "", 8, 2),
        stage_stride=1,
    ).run()


def reduced(name: str) -> tuple[Start, Wait]:
    """One number over all stages, under the name its program gives it."""
    call = CollectiveCall("all_reduce", ("pp",), DType.F32, (1, 1, 1), "add", name=name)
    return Start(call, 0), Wait(0)


def test_stages_meet_at_a_collective_whatever_their_programs_call_it() -> None:
    """The last stage has one more reduction in its update, so that numbers differ."""
    classes = refine({"pp": 2}, [("pp",)], [0, 1])
    programs = [
        (stretch(10, "update"), *reduced("all_reduce.3")),
        (stretch(40, "update"), *reduced("all_reduce.4")),
    ]
    price = CollectiveDuration(5, Demand(0.0), "ring", "", 4, 2)
    first, second = ClusterLoop(classes, programs, lambda call, _: price, stage_stride=1).run()
    assert first.charged_ps == {"compute": 10, "bubble": 30, "collective_pp": 5}
    assert second.charged_ps == {"compute": 40, "collective_pp": 5}


def test_messages_of_one_size_are_told_apart_by_their_names() -> None:
    """The first is there at 7, the second at 107; who takes the second first is at its work from
    107 to 157 and has the other one then. The sender ends with its message."""
    first, second = (
        CollectiveCall("permute", ("pp",), DType.U8, (1, 8, 1), name=name, pairs=((0, 1),))
        for name in ("a", "b")
    )
    programs = [
        (Send(first), stretch(100, "between"), Send(second)),
        (Receive(second), stretch(50, "work"), Receive(first)),
    ]
    classes = refine({"pp": 2}, [("pp",)], [0, 1])
    price = CollectiveDuration(7, Demand(0.0), "direct", "", 8, 2)
    results = ClusterLoop(classes, programs, lambda call, _: price, stage_stride=1).run()
    assert [result.end_ps for result in results] == [107, 157]


def test_values_meet_whatever_their_programs_call_it() -> None:
    calls = [reduced(name)[0].call for name in ("all_reduce.3", "all_reduce.4")]
    got: list[np.ndarray] = []
    requests = [
        CollectiveRequest(call, np.full(1, 2.0 + n, np.float32), got.append)
        for n, call in enumerate(calls)
    ]
    exchange(requests, {"pp": 2})
    assert [array.item() for array in got] == [5.0, 5.0]
    other = dataclasses.replace(calls[0], source_shape=(1, 2, 1))
    requests[1] = CollectiveRequest(other, np.zeros(2, np.float32), got.append)
    with pytest.raises(SimulationError, match="SW_SIM_LOCK_STEP"):
        exchange(requests, {"pp": 2})
