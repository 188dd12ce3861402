"""What a step is made of: functions sum to the breakdown, runs fill the schedule, a call's tracks
lie inside it; and all of it survives the way through a work unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.isa.program import Call, Repeat
from shardwright.compiler.neff.bundle import Bundle
from shardwright.compiler.neff.schedule import first_of, flat
from shardwright.compiler.timing.evaluate import function_segments
from shardwright.orchestrator.road.timing import step_of
from shardwright.sim_cluster.profiles import under_profile
from shardwright.sim_cluster.timing import step_parts as parts_module
from shardwright.sim_cluster.timing.actors import Span
from shardwright.sim_cluster.timing.faults import Faults
from shardwright.sim_cluster.timing.macro import Mark, schedule_macros
from shardwright.sim_cluster.timing.step_parts import FunctionTime, StepParts, step_parts
from shardwright.sim_cluster.timing.step_time import Replayed, Step, time_step
from shardwright.sim_cluster.timing.timing_unit import answer, decode_answer, encode_question
from tests.support.small_job import Road


@pytest.fixture(scope="module")
def step(small_road: Road, small_bundle: Bundle) -> Step:
    """The small llama on four cores, one of them slow."""
    healthy = step_of(small_road.built, small_bundle.programs)
    return replace(healthy, faults=Faults(slow_cores={1: 1.5}))


@pytest.fixture(scope="module")
def timing(step: Step) -> Replayed:
    return time_step(step)


@pytest.fixture(scope="module")
def parts(timing: Replayed) -> StepParts:
    return step_parts(timing)


def many(step: Step, count: int) -> Step:
    (programs, _), *rest = step.schedules[0]
    return replace(step, schedules=(((programs, count), *rest),))


def charged(parts: StepParts) -> Counter[str]:
    total: Counter[str] = Counter()
    for function in parts.functions:
        total.update(function.charged_ps)
    return total


def test_functions_sum_to_the_breakdown(timing: Replayed, parts: StepParts) -> None:
    step = {k: v for k, v in timing.breakdown_ps.items() if v and k != "idle"}
    assert charged(parts) == step
    assert any(k.startswith("collective") for k in step)


def test_calls_are_those_of_the_programs(step: Step, parts: StepParts) -> None:
    """Two layers and two micro-batches; counted here over the expanded schedule."""

    def called(steps: tuple[Call | Repeat, ...]) -> list[int]:
        out: list[int] = []
        for one in steps:
            out += called(one.steps) * one.trip if isinstance(one, Repeat) else [one.function]
        return out

    expected: Counter[tuple[str, int]] = Counter()
    for name in flat(step.schedules[0]):
        expected.update((name, number) for number in [-1, *called(step.programs[name].steps)])
    assert {(f.program, f.number): f.calls for f in parts.functions} == expected


def test_kernels_are_those_of_the_evaluator(step: Step, parts: StepParts) -> None:
    for function in parts.functions:
        if function.number < 0:
            assert not function.kernels
            continue
        code = step.programs[function.program].functions[function.number]
        segments = function_segments(code, under_profile(step.target, "nominal"))
        assert function.kernels == tuple(k for s in segments for k in s.kernels)


def test_what_is_multiplied_is_what_a_replay_of_all_gives(step: Step) -> None:
    quick, whole = (time_step(many(step, 12), traced=traced) for traced in (False, True))
    assert len(quick.last.ran) < len(whole.last.ran)
    few, all_of_it = step_parts(quick), step_parts(whole)
    assert few.functions == all_of_it.functions
    assert few.timelines == all_of_it.timelines
    (gap,) = [run for run in few.runs if run.program == "repeated"]
    assert sum(run.runs for run in few.runs) == len(all_of_it.runs) == 25
    assert [r for r in few.runs if r != gap] == [
        r for r in all_of_it.runs if r.end_ps <= gap.start_ps or r.start_ps >= gap.end_ps
    ]


def test_runs_of_a_stage_do_not_overlap(step: Step, parts: StepParts, timing: Replayed) -> None:
    assert [run.program for run in parts.runs] == list(flat(step.schedules[0]))
    assert parts.runs[-1].end_ps == timing.step_time_ps
    for first, then in pairwise(parts.runs):
        assert first.start_ps < first.end_ps <= then.start_ps


def test_runs_that_were_all_replayed_have_no_gap() -> None:
    """Of three micro-batches the first has a program of its own for `backward`, whose runs are
    counted with it: the others are the runs 1 and 2. All seven runs are there, of 10 ps each."""
    own = first_of("backward")
    schedule = ((("forward", own), 1), (("forward", "backward"), 2), (("update",), 1))
    names = ["forward", own, "forward", "backward", "forward", "backward", "update"]
    code = dict.fromkeys(names, ())
    marks = [op for op in schedule_macros(code, schedule) if isinstance(op, Mark) and op.name]
    spans = [Span("program", m.name, 10 * n, 10 * n + 10) for n, m in enumerate(marks)]
    timing: Any = SimpleNamespace(
        step=SimpleNamespace(schedules=[schedule]),
        last_of=lambda stage: SimpleNamespace(spans=spans),
    )
    found = list(parts_module._runs(timing, 0))
    assert [(run.program, run.runs) for run in found] == [(name, 1) for name in names]
    assert [(run.start_ps, run.end_ps) for run in found] == [(t, t + 10) for t in range(0, 70, 10)]


def test_charts_are_bounded(
    timing: Replayed, parts: StepParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "MAX_RUNS", 2)
    monkeypatch.setattr(parts_module, "MAX_SLICES", 9)
    small = step_parts(timing)
    assert len(small.runs) == 2
    assert sum(run.runs for run in small.runs) == len(parts.runs)
    for few, all_of_it in zip(small.timelines, parts.timelines, strict=True):
        shown = sum(len(track.slices) for track in few.tracks)
        assert 9 <= shown < sum(len(track.slices) for track in all_of_it.tracks)
        assert few.left_out + shown == sum(len(track.slices) for track in all_of_it.tracks)


def test_a_timeline_is_one_call(parts: StepParts) -> None:
    longest, other = parts.timelines
    assert longest.program != other.program
    first = next(f for f in parts.functions if f.number >= 0)
    assert (longest.program, longest.number) == (first.program, first.number)
    for timeline in parts.timelines:
        assert {"core", "tensor", "dma_in"} <= {track.name for track in timeline.tracks}
        assert timeline.left_out == 0
        for track in timeline.tracks:
            for _, start, end in track.slices:
                assert 0 <= start <= end <= timeline.duration_ps
    alone = sum(k.duration_ps for k in first.kernels)
    assert longest.duration_ps >= 0.99 * alone * 1.5  # the slow core is the last


def test_the_longest_functions_of_two_programs_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `forward` 0, 30 + 30 ps, its function 1 has 50 and its launch 90; of `backward` 40, and of
    `update` 10. What has no code of its own is not there to be drawn."""
    spent = [
        ("forward", -1, {"launch": 90}),
        ("forward", 1, {"compute": 50}),
        ("forward", 0, {"compute": 30, "memory": 30}),
        ("update", 2, {"compute": 10}),
        ("backward", 0, {"memory": 40}),
    ]
    functions = [
        FunctionTime(program=program, number=number, calls=1, charged_ps=charged, kernels=())
        for program, number, charged in spent
    ]
    drawn = {place: f"drawing of {place}" for place in (("forward", 0), ("backward", 0))}
    monkeypatch.setattr(parts_module, "_functions", lambda timing: functions)
    monkeypatch.setattr(parts_module, "_timeline", lambda timing, place: drawn.get(place))
    timing: Any = SimpleNamespace(stages_ps=())
    found = step_parts(timing)
    assert [sum(f.charged_ps.values()) for f in found.functions] == [90, 60, 50, 40, 10]
    assert list(found.timelines) == list(drawn.values())
    del drawn["forward", 0]
    assert list(step_parts(timing).timelines) == list(drawn.values())


@pytest.mark.parametrize("change", [lambda step: step, lambda step: many(step, 9)])
def test_a_unit_answers_the_same(step: Step, change: Callable[[Step], Step]) -> None:
    asked = change(step)
    found = decode_answer(answer(encode_question(asked, "peak")))
    assert found.parts == step_parts(time_step(asked, "peak"))
