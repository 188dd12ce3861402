"""Captures that jobs of one process share: one per distinct step, none across models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.road import stages as road
from shardwright.orchestrator.road.stages import Stages, Traces
from tests.support.small_job import SIZES, write_job


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sample counts of every capture."""
    real, seen = road.capture, []

    def capture(task: object, samples: int, base: Path) -> object:
        seen.append(samples)
        return real(task, samples, base)

    monkeypatch.setattr(road, "capture", capture)
    return seen


def trace(traces: Traces, job: JobConfig, samples: int = 4) -> object:
    stages = Stages(traces=traces)
    return stages.trace(job, traces.task(job), samples)


def test_equal_questions_are_captured_once(tmp_path: Path, counted: list[int]) -> None:
    path, traces = write_job(tmp_path), Traces()
    first = trace(traces, load(path, ["mesh.dp_shard=4"]))
    assert trace(traces, load(path, ["mesh.tp=4", "strategy.name=llm-training"])) is first
    assert counted == [4]


def test_a_ring_has_a_step_of_its_own(tmp_path: Path) -> None:
    """It keeps maxima of rows that others make again."""
    path, traces = write_job(tmp_path), Traces()
    gathered = trace(traces, load(path, ["mesh.cp=4"]))
    assert trace(traces, load(path, ["mesh.cp=4", "strategy.context=ring"])) is not gathered


@pytest.mark.matrix
def test_whatever_changes_the_step_is_captured_again(tmp_path: Path, counted: list[int]) -> None:
    path, traces = write_job(tmp_path), Traces()
    different = [
        [],
        ["strategy.remat=none"],
        ["model.seq_len=4"],
        ["model.dtype=bfloat16"],
        ["compiler.auto_cast=all"],
        ["strategy.name=manual"],
    ]
    found = [trace(traces, load(path, changes)) for changes in different]
    found.append(trace(traces, load(path), 8))
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": 3}))
    found.append(trace(traces, load(path)))
    assert len({id(one) for one in found}) == len(found) == len(counted)
