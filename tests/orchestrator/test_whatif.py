"""Ideas for a job, by what limits it; each tried on the whole road and kept."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import ExecutionError
from shardwright.orchestrator.changes.change import changed
from shardwright.orchestrator.changes.rules import WORTH, ideas
from shardwright.orchestrator.changes.situation import situation_of
from shardwright.orchestrator.config.config import TRIES, CacheConfig, JobConfig
from shardwright.orchestrator.report.bottleneck import CAPACITY, COLLECTIVE, LATENCY, bottleneck
from shardwright.orchestrator.report.tried import effect_text
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.road.plan_cache import plan, plan_parts
from shardwright.orchestrator.whatif import advised as advised_module
from shardwright.orchestrator.whatif import tries
from shardwright.orchestrator.whatif.advised import with_tries
from shardwright.sharding.settings import AUTO
from tests.support.plans import job_of

KINDS = ("compute", "memory", LATENCY, COLLECTIVE, "bubble", "launch", "idle", "host")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    return job_of(
        tmp_path_factory.mktemp("whatif"),
        layers=2,
        mesh={"dp_shard": 16, "tp": 2},
        strategy={"global_batch": 32, "zero": 3},
        run={"tries": 2},
        cache={"dir": str(tmp_path_factory.mktemp("cache"))},
    )


@pytest.fixture(scope="module")
def report(job: JobConfig) -> dict[str, Any]:
    return plan(job)


def limited(report: dict[str, Any], kind: str) -> dict[str, Any]:
    """The report of a step that is mostly of one category."""
    found = copy.deepcopy(report)
    timing = found["timing"]
    category = {COLLECTIVE: "collective_tp", LATENCY: "memory"}.get(kind, kind)
    timing["breakdown_ps"] = {category: timing["step_time_ps"]}
    for name, engine in timing["engines"].items():
        engine["share"] = 1.0 if (name, kind) == ("dma_in", "memory") else 0.0
    found["pipeline"] = {"num_microbatches": 2, "schedule": "1f1b", "stages": [{}, {}]}
    return found


def test_every_bottleneck_has_a_sentence_and_rules(report: dict[str, Any]) -> None:
    assert set(WORTH) == {*KINDS, CAPACITY}
    for kind in KINDS:
        found = bottleneck(limited(report, kind))
        assert found["kind"] == kind and found["share"] == 1.0 and "100 %" in found["text"]
    over = copy.deepcopy(report)
    over["memory"] |= {"fits": False, "limit_bytes": 1000}
    found = bottleneck(over)
    assert found["kind"] == CAPACITY and "over the limit" in found["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_ideas_change_the_job_and_keep_its_samples(
    kind: str, job: JobConfig, report: dict[str, Any]
) -> None:
    """Each differs from the job and from the others; where samples of a step change, it says so."""
    shaped = limited(report, kind)
    changes = [changed(job, idea.keys) for idea in ideas(situation_of(job, report), shaped)]
    jobs = [change.job for change in changes]
    assert jobs and job not in jobs
    assert all(one not in jobs[:n] for n, one in enumerate(jobs))
    for change in changes:
        samples = change.job.strategy.global_batch
        assert samples == 32 or "global_batch=64" in change.text


def test_what_surely_does_not_fit_is_no_idea(job: JobConfig, report: dict[str, Any]) -> None:
    shaped = limited(report, "compute")

    def texts() -> list[str]:
        found = ideas(situation_of(job, report), shaped)
        return [changed(job, idea.keys).text for idea in found]

    assert "mesh.dp_shard=32 mesh.tp=1 strategy.global_batch=32" in texts()
    shaped["memory"]["limit_bytes"] = shaped["memory"]["peak_bytes"] + 1
    assert "mesh.dp_shard=32 mesh.tp=1 strategy.global_batch=32" not in texts()


@pytest.mark.matrix
def test_tries_are_plans_of_their_own(job: JobConfig, report: dict[str, Any], monkeypatch) -> None:
    section = with_tries(job)["whatif"]
    assert len(section["tried"]) == 2
    for row in section["tried"]:
        assert row["status"] in ("fits", "does not fit", "refused")
    fits = [row for row in section["tried"] if row["status"] == "fits"]
    assert fits, section
    now = situation_of(job, report)
    by_text = {changed(job, idea.keys).text: idea for idea in ideas(now, report)}
    own = changed(job, by_text[fits[0]["change"]].keys).job

    def never(*_: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(plan_cache, "_fresh", never)
    again = plan(own)  # what the user asks next is answered from the cache
    assert again["timing"]["step_time_s"] == fits[0]["step_time_s"]
    before, after = report["timing"]["tokens_per_s"], again["timing"]["tokens_per_s"]
    assert fits[0]["time_change"] == pytest.approx(before / after - 1)
    stored = with_tries(job)["whatif"]
    stored_s = stored.pop("stored_s")
    assert stored_s > 0 and stored == section
    in_time = dataclasses.replace(job, run=dataclasses.replace(job.run, tries=AUTO))
    assert with_tries(in_time)["whatif"] == section | {
        "stored_s": stored_s
    }  # however late it is: they are known


@pytest.mark.parametrize(("count", "is_shared"), [(TRIES, True), (TRIES - 1, False)])
def test_as_many_tries_as_are_usual_answer_who_asks_for_the_usual(
    count: int, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` that had time for all of them; fewer are an answer to `auto` alone."""
    made: list[int] = []

    def advice(job: JobConfig, report: object, count: int, progress: object) -> dict[str, Any]:
        made.append(count)
        return {"tried": [], "left": ["mesh.tp=2"]}

    report: dict[str, Any] = {"provenance": {"plan_key": "a", "stages_s": {}}}
    monkeypatch.setattr(advised_module, "plan", lambda *_, **__: report)
    monkeypatch.setattr(tries, "affordable", lambda wanted, *_: count if wanted == AUTO else wanted)
    monkeypatch.setattr(tries, "advice", advice)

    def asked(wanted: int) -> JobConfig:
        own = JobConfig(cache=CacheConfig(dir=str(tmp_path)))
        return dataclasses.replace(own, run=dataclasses.replace(own.run, tries=wanted))

    for _ in range(2):
        with_tries(asked(AUTO))
        assert made == [count]  # the second time it is known
    assert list(report["provenance"]["stages_s"]) == ["tries"]
    with_tries(asked(TRIES))
    assert made == ([count] if is_shared else [count, TRIES])


def test_a_try_that_failed_is_tried_again(
    job: JobConfig, report: dict[str, Any], monkeypatch
) -> None:
    """What died says nothing about the change, and does not take the job's own answer with it."""
    failures = [ExecutionError("SW_WORKER", "a worker died"), ZeroDivisionError("a defect")]

    def plans(jobs: Mapping[str, JobConfig], _: JobConfig) -> Iterator[tuple[str, Any]]:
        for text in jobs:
            future: Future[Any] = Future()
            if failures:
                future.set_exception(failures.pop(0))
            else:
                future.set_result(report)
            yield text, future

    other = dataclasses.replace(job, strategy=dataclasses.replace(job.strategy, micro_batch=2))
    with monkeypatch.context() as patched:
        patched.setattr(tries, "plans", plans)
        tried = with_tries(other)["whatif"]["tried"]
        again = with_tries(other)["whatif"]["tried"]
    assert sorted(row["code"] for row in tried) == ["SW_INTERNAL", "SW_WORKER"]
    assert {row["status"] for row in tried} == {tries.FAILED}
    assert "ZeroDivisionError" in effect_text(tried[0], "token") + effect_text(tried[1], "token")
    assert {row["status"] for row in again} == {"fits"}


def test_no_try_begins_that_would_not_be_over_in_time(
    job: JobConfig, report: dict[str, Any], monkeypatch
) -> None:
    monkeypatch.setattr(tries, "_tried", lambda chosen, *_: (chosen and pytest.fail()) or [])
    late = copy.deepcopy(report)
    late["provenance"]["stages_s"] = {"compile": 30.0}
    late["provenance"].pop("computed_in_s", None)
    asked = dataclasses.replace(job, run=dataclasses.replace(job.run, tries=-1))
    section = tries.advice(asked, late, tries.affordable(AUTO, late, time.perf_counter()))
    assert section["tried"] == [] and len(section["left"]) == TRIES
    none = dataclasses.replace(job, run=dataclasses.replace(job.run, tries=0))
    assert "whatif" not in with_tries(none)


def test_one_try_for_want_of_time_is_no_answer_to_two(
    job: JobConfig, report: dict[str, Any], monkeypatch
) -> None:
    """Changes with which a job would fit are sought only as many as are tried: none is left."""
    over = copy.deepcopy(report)
    over["memory"]["fits"], over["provenance"]["plan_key"] = False, "over"
    changes = [changed(job, {"strategy.micro_batch": n}) for n in (2, 4)]
    monkeypatch.setattr("shardwright.orchestrator.whatif.advised.plan", lambda *_, **__: over)
    monkeypatch.setattr(tries, "_fitting", lambda *_: iter(changes))
    refused = {"status": "refused", "helps": False, "code": "SW_X", "message": "refused"}
    monkeypatch.setattr(
        tries, "_tried", lambda chosen, *_: [{"change": c.text, **refused} for c in chosen]
    )
    monkeypatch.setattr(tries, "affordable", lambda wanted, *_: 1 if wanted == AUTO else wanted)

    def tried(wanted: int) -> list[str]:
        asked = dataclasses.replace(job, run=dataclasses.replace(job.run, tries=wanted))
        return [row["change"] for row in with_tries(asked)["whatif"]["tried"]]

    both = [change.text for change in changes]
    assert [tried(wanted) for wanted in (AUTO, TRIES, AUTO)] == [both[:1], both, both]


@pytest.mark.matrix
def test_a_job_that_does_not_fit_is_made_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit by what half of a micro-batch holds."""
    asked = job_of(
        tmp_path,
        mesh={"dp_replicate": 32},
        strategy={"name": "generic", "micro_batch": 4, "global_batch": 256},
        run={"tries": 2},
    )
    peak = plan(asked)["memory"]["peak_bytes"]
    monkeypatch.setattr("shardwright.compiler.machine.target.Target.limit_bytes", int(peak * 0.975))
    monkeypatch.setattr(plan_cache, "plan_parts", lambda job: plan_parts(job) | {"limit": ""})
    found = with_tries(asked)
    assert not found["memory"]["fits"] and plan_cache.exit_code(found) == 71
    assert any(row["status"] == "fits" and row["helps"] for row in found["whatif"]["tried"])
    assert any("micro_batch=2" in row["change"] for row in found["whatif"]["tried"])


def test_a_lowered_step_keeps_its_samples_in_flight(job: JobConfig, report: dict[str, Any]) -> None:
    model = dataclasses.replace(job.model, config="", hlo="step.mlir")
    lowered = dataclasses.replace(job, model=model)
    for kind in KINDS:
        shaped = limited(report, kind)
        for idea in ideas(situation_of(lowered, report), shaped):
            ways = idea.keys.get("mesh.dp_shard", 16) * idea.keys.get("mesh.dp_replicate", 1)
            assert ways * idea.keys.get("strategy.micro_batch", 1) == 16, idea
            assert "model.dtype" not in idea.keys and "strategy.remat" not in idea.keys
