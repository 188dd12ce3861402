"""Traces: what viewers demand of the file, and sums that agree with the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.road.timing import step_of
from shardwright.sharding.cut.pipeline.schedules import stage_schedules
from shardwright.sim_cluster.timing.faults import Faults
from shardwright.sim_cluster.timing.step_time import Replayed, Step, time_step
from shardwright.sim_cluster.timing.trace import trace_events, trace_json
from tests.sim_cluster.test_pipeline_timing import neighbours, simulate
from tests.support.small_job import Road

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma_in", "dma_out")
METADATA = {f"{of}_{what}" for of in ("process", "thread") for what in ("name", "sort_index")}
Event = Mapping[str, Any]


@pytest.fixture(scope="module")
def step(small_road: Road, small_bundle: Bundle) -> Step:
    """The small llama on four cores, one of them slow."""
    healthy = step_of(small_road.built, small_bundle.programs)
    return replace(healthy, faults=Faults(slow_cores={1: 1.5}))


@pytest.fixture(scope="module")
def timing(step: Step) -> Replayed:
    return time_step(step)


def check_events(events: list[Event]) -> None:
    """The trace event format, as far as complete and metadata events go, and one level of slices
    per track."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in events:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        where = (event["pid"], event["tid"])
        assert all(isinstance(number, int) for number in where)
        if event["ph"] == "M":
            assert event["name"] in {
                f"{w}_{k}" for w in ("process", "thread") for k in ("name", "sort_index")
            }
            named.add((event["name"], *where))
            continue
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        tracks.setdefault(where, []).append((event["ts"], event["ts"] + event["dur"]))
    for where, slices in tracks.items():
        assert ("thread_name", *where) in named
        assert ("process_name", where[0], 0) in named
        for (_, end), (start, _) in pairwise(sorted(slices)):
            assert end <= start + 1e-6


def test_the_file_is_what_viewers_read(timing: Replayed) -> None:
    data = json.loads(trace_json(timing))
    assert data["otherData"]["step_time_ps"] == timing.step_time_ps
    check_events(data["traceEvents"])
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert {
        "program",
        "core",
        "tensor",
        "vector",
        "scalar",
        "dma_in",
        "dma_out",
        "stream0",
    } <= names


def test_sums_agree_with_the_report(timing: Replayed) -> None:
    events = [e for e in trace_events(timing) if e["ph"] == "X"]
    last = max(range(timing.classes.count), key=lambda c: timing.results[c].end_ps)
    own = [e for e in events if e["pid"] == last]
    core = [e for e in own if e["cat"] == "core"]
    charged: Counter[str] = Counter()
    for event in core:
        charged.update(event["args"]["charged_ps"])
        assert sum(event["args"]["charged_ps"].values()) == event["args"]["ps"]
        assert event["dur"] * 10**6 == pytest.approx(event["args"]["ps"], abs=1)
    assert charged == {k: v for k, v in timing.breakdown_ps.items() if v and k != "idle"}
    for engine in ENGINES:
        busy = sum(e["args"]["busy_ps"] for e in own if e["cat"] == engine)
        assert busy == timing.engines_ps.get(engine, 0)
    inside: Counter[tuple[str, str, int]] = Counter()
    for event in (e for e in own if e["cat"].startswith("stream")):
        args = event["args"]
        inside[args["kind"], args["axes"], args["bytes"]] += args["ps"]
    uses: Counter[tuple[str, str, int]] = Counter()
    for use in timing.collectives:
        uses[use.call.kind, "_".join(use.call.axes), use.cost.size_bytes] += use.total_ps
    assert inside == uses
    programs = Counter(e["name"] for e in own if e["cat"] == "program")
    assert programs == dict.fromkeys(
        ("forward 0", "forward 1", "backward 0", "backward 1", "update"), 1
    )


def test_ranks_are_found_again(timing: Replayed) -> None:
    """The slow core, the one beside it on its chip, and the two that are like each other."""
    names = [e["args"]["name"] for e in trace_events(timing) if e["name"] == "process_name"]
    assert sorted(names) == ["rank 0", "rank 1", "rank 2-3"]


def test_classes_have_the_times_of_their_ranks(step: Step, timing: Replayed) -> None:
    """On real programs: four ranks on their own end when their classes do."""
    apart = time_step(step, folded=False)
    assert apart.classes.count == 4
    assert apart.step_time_ps == timing.step_time_ps
    for rank, index in enumerate(timing.classes.of_rank):
        assert apart.results[rank].charged_ps == timing.results[index].charged_ps
    healthy = time_step(replace(step, faults=Faults()))
    assert healthy.classes.count == 1
    assert healthy.step_time_ps < timing.step_time_ps < 1.5 * healthy.step_time_ps + 1


def test_stages_of_a_pipeline_and_messages_that_overlap(timing: Replayed) -> None:
    """Every stage is a process; messages in flight together are on tracks of their own."""
    schedules = stage_schedules("1f1b", 4, 4, 8)
    results = simulate(schedules, neighbours(4, 4), 4, message_ps=350, ranks=1)
    piped = replace(timing, results=results, stages_ps=({},) * 4, stage_of=(0, 1, 2, 3))
    piped = replace(piped, classes=_four(piped))
    events = trace_events(piped)
    check_events(events)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"stage {n}: rank {n}" for n in range(4)]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "messages (2)" in tracks
    done = [e for e in events if e["pid"] == 0 and e.get("cat") == "program"]
    assert Counter(e["name"].split()[0] for e in done)["forward.0"] == 8


def _four(timing: Replayed) -> Any:
    return replace(timing.classes, of_rank=(0, 1, 2, 3), groups={}, banks=())


def test_two_physical_cores_have_their_own_tracks(step: Step) -> None:
    halves = replace(time_step(step), lnc=2)
    names = {e["args"]["name"] for e in trace_events(halves) if e["name"] == "thread_name"}
    assert {"tensor of physical core 0", "tensor of physical core 1"} <= names
    events = [e for e in trace_events(halves) if e.get("cat", "").startswith("tensor of")]
    whole = [e for e in trace_events(time_step(step)) if e.get("cat") == "tensor"]
    assert sum(e["args"]["busy_ps"] for e in events) == sum(e["args"]["busy_ps"] for e in whole)


def test_many_micro_batches_are_multiplied(step: Step) -> None:
    """On real programs with a slow core: what is multiplied is what a replay of all gives."""
    (programs, _), *rest = step.schedules[0]
    many = replace(step, schedules=(((programs, 12), *rest),))
    quick, whole = time_step(many), time_step(many, traced=True)
    assert len(quick.results[0].ran) < len(whole.results[0].ran)
    assert quick.step_time_ps == whole.step_time_ps
    assert quick.breakdown_ps == whole.breakdown_ps
    assert quick.engines_ps == whole.engines_ps
    assert quick.collectives == whole.collectives
    assert sum(quick.breakdown_ps.values()) == quick.step_time_ps
