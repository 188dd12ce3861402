"""Keys of plans and of predictions: every part is in them, what answers do not depend on is not."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.config.config import (
    TABLES,
    CacheConfig,
    GoalConfig,
    JobConfig,
    OutputConfig,
    PriceConfig,
    RunConfig,
)
from shardwright.orchestrator.keys import environment, freshness
from shardwright.orchestrator.keys.reads import observed
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.road.plan_cache import NOT_IN_KEY, plan_key
from shardwright.orchestrator.service.units import PACKAGES, parts_digest, source_digest
from shardwright.orchestrator.validation import predict
from shardwright.orchestrator.validation.published import Storage, Workload
from shardwright.orchestrator.whatif.advised import key_parts
from shardwright.sim_cluster.profiles import Profile
from tests.support.changed import changes, other

TRN1N = "trn1n.32xlarge"
PROFILE = Profile(name="nominal", streaming=0.9, stall_recovery=0.5)

KEYS = [
    pytest.param(table, row.name, id=f"{table}.{row.name}")
    for table, kind in TABLES.items()
    for row in dataclasses.fields(kind)
    if table not in NOT_IN_KEY and "key" not in row.metadata
]


def changed_job(table: str, name: str, value: Any = None) -> JobConfig:
    keys = getattr(JobConfig(), table)
    value = other(getattr(keys, name)) if value is None else value
    return replace(JobConfig(), **{table: replace(keys, **{name: value})})


@pytest.mark.parametrize(("table", "name"), KEYS)
def test_every_key_of_a_job_is_in_the_key_of_its_plan(
    table: str, name: str, tmp_path: Path
) -> None:
    values = {"target": "trn1.32xlarge"}
    if (table, name) == ("model", "config"):
        (tmp_path / "config.json").write_text("{}")
        values["config"] = str(tmp_path / "config.json")
    assert plan_key(changed_job(table, name, values.get(name))) != plan_key(JobConfig())


@pytest.mark.parametrize(
    "job",
    [
        JobConfig(output=OutputConfig(dir="elsewhere", events="events.jsonl")),
        JobConfig(cache=CacheConfig(max_gib=1.0)),
        JobConfig(run=RunConfig(steps=9, seed=4, executor="process", workers=3, progress="json")),
        JobConfig(goal=GoalConfig(tokens=10**12, deadline=3600.0, budget=2e6)),
        JobConfig(price=PriceConfig(kind="capacity-block", usd_per_hour=((TRN1N, 3.0),))),
        JobConfig(base="/"),
    ],
)
def test_where_a_plan_goes_and_how_it_is_made_are_not_in_its_key(job: JobConfig) -> None:
    assert plan_key(job) == plan_key(JobConfig())


def test_the_table_of_the_machine_is_in_the_key_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_key(JobConfig())
    edited = replace(load_target(TRN1N), digest="edited")
    monkeypatch.setattr(plan_cache, "load_target", lambda _: edited)
    assert plan_key(JobConfig()) != before


@pytest.mark.parametrize("package", PACKAGES)
def test_all_sources_are_in_the_key_of_a_plan(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, edited = plan_key(JobConfig()), {(package,): "edited"}
    monkeypatch.setattr(
        plan_cache, "source_digest", lambda names: edited.get(names) or source_digest(names)
    )
    assert plan_key(JobConfig()) != before


def test_packages_that_capture_are_in_the_key_of_a_plan_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, names = plan_key(JobConfig()), environment.installed()
    for name in (*environment.LIBRARIES, "ML_dtypes"):
        with monkeypatch.context() as patched:
            there = [*names, f"{name}-0.0.1.dist-info"]
            patched.setattr(environment, "installed", lambda found=there: found)
            assert plan_key(JobConfig()) != before, name
    monkeypatch.setattr(environment, "installed", lambda: [*names, "jax_moseq-1.0.dist-info"])
    assert plan_key(JobConfig()) == before


def test_variables_that_jax_reads_are_in_the_key_of_a_plan_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [plan_key(JobConfig())]
    for name, value in (("JAX_DEFAULT_PRNG_IMPL", "rbg"), ("XLA_FLAGS", "--x"), ("JAX_NEW", "1")):
        monkeypatch.setenv(name, value)
        keys.append(plan_key(JobConfig()))
    assert len(set(keys)) == 4
    monkeypatch.setenv("PAGER", "other")
    assert plan_key(JobConfig()) == keys[-1]


@pytest.mark.parametrize(("key", "file"), [("config", "config.json"), ("hlo", "step.hlo")])
def test_the_users_file_is_in_the_key_of_a_plan(key: str, file: str, tmp_path: Path) -> None:
    job = replace(changed_job("model", key, file), base=str(tmp_path))
    (tmp_path / file).write_text('{"hidden_size": 32}')
    before = plan_key(job)
    (tmp_path / file).write_text('{"hidden_size": 64}')
    assert plan_key(job) != before


def test_what_an_entry_read_is_in_the_key_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module at once, the rest once a plan has learned of it."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    folder, data = tmp_path / "job", tmp_path / "data.txt"
    folder.mkdir()
    mine, beside = folder / "mine.py", folder / "beside.py"
    mine.write_text("WIDTH = 1")
    job = replace(changed_job("model", "entry", "mine:task"), base=str(folder))
    keys = [plan_key(job)]
    mine.write_text("WIDTH = 3")
    keys.append(plan_key(job))
    for path in (data, beside):
        path.write_text("before")
    assert plan_key(job) == keys[-1]
    read = observed((f"read {data}", f"looked for {folder}/jaxlib"))
    learned = plan_cache._learned(job, plan_cache.plan_parts(job), read)
    assert parts_digest("plan", learned) == plan_key(job) != keys[-1]
    keys.append(plan_key(job))
    beside.write_text("after")
    assert plan_key(job) == keys[-1]
    data.write_text("after")
    keys.append(plan_key(job))
    (folder / "jaxlib").mkdir()  # another module of a name that was looked for
    keys.append(plan_key(job))
    assert len(set(keys)) == len(keys)


def test_a_change_that_is_taken_back_has_its_older_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read depends on what is in another file."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text("")
    job = replace(changed_job("model", "entry", "mine:task"), base=str(tmp_path))
    names = [tmp_path / name for name in ("which", "one", "other")]
    for path in names:
        path.write_text(path.name)
    lists = [[f"read {names[0]}", f"read {path}"] for path in names[1:]]
    keys = []
    for word, read in zip(("one", "other"), lists, strict=True):
        names[0].write_text(word)
        parts = plan_cache._learned(job, plan_cache._own_parts(job), observed(read))
        keys.append(parts_digest("plan", parts))
        open_cache(job.cache).put("plan", keys[-1], b"{}")
    assert plan_key(job) == keys[1] != keys[0]
    names[0].write_text("one")
    assert plan_key(job) == keys[0]
    names[2].write_text("changed")  # which the older answer did not read
    assert plan_key(job) == keys[0]
    names[1].write_text("changed")
    assert plan_key(job) not in keys


def test_a_list_of_reads_is_kept_once_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text("")
    job = replace(changed_job("model", "entry", "mine:task"), base=str(tmp_path))
    lists = [[f"read {tmp_path / name}"] for name in ("one", "other")]
    for names in (lists[0], lists[1], lists[1], lists[0], lists[0]):
        parts = plan_cache._learned(job, plan_cache._own_parts(job), observed(names))
    own = {name: value for name, value in parts.items() if not name.startswith("model's ")}
    assert plan_cache._read_lists(open_cache(job.cache), own) == lists


def test_a_plan_of_files_that_changed_meanwhile_is_one_of_what_was_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is read when the question is asked and when it is answered; in between somebody
    writes another one."""
    monkeypatch.setattr(freshness, "_FOLDERS", {})
    monkeypatch.setattr(plan_cache, "_traced", lambda *_: {"traced": "step"})
    traces = SimpleNamespace(is_doubtful=lambda _: False, reads=lambda _: {})
    stages: Any = SimpleNamespace(traces=traces)
    job = replace(changed_job("model", "hlo", "step.hlo"), base=str(tmp_path))
    (tmp_path / "step.hlo").write_text("before")
    parts = plan_cache.plan_parts(job)
    assert plan_cache._answered(job, job, parts, stages) == parts
    (tmp_path / "step.hlo").write_text("after")
    assert plan_cache._answered(job, job, parts, stages) == {"traced": "step"}


def test_tries_are_keyed_by_price_plan_and_number() -> None:
    """By the price, since what helps also costs less; by no goal."""
    usual, block = JobConfig(), JobConfig(price=PriceConfig(kind="capacity-block"))
    rows = [(usual, "a", 2), (usual, "a", 3), (usual, "b", 2), (block, "a", 2)]
    keys = [parts_digest("whatif", key_parts(*row)) for row in rows]
    assert len(set(keys)) == len(rows)
    asked = replace(usual, goal=GoalConfig(tokens=7))
    assert parts_digest("whatif", key_parts(asked, "a", 2)) == keys[0]


# Predictions of published runs


def test_a_prediction_is_keyed_by_run_profile_constants_and_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage(params="bf16", activations="bf16", statistics="f32", gradients="f32")
    fields: dict[str, Any] = {row.name: 1 for row in dataclasses.fields(Workload)}
    fields |= {"target": TRN1N, "storage": storage}
    run = Workload(**fields)
    first = predict._key(run, PROFILE)
    keys = {first}
    for name in fields:
        value = {"target": "trn1.32xlarge", "storage": replace(storage, params="f32")}.get(name, 2)
        keys.add(predict._key(replace(run, **{name: value}), PROFILE))
    for _, changed in changes(PROFILE):
        keys.add(predict._key(run, changed))
    constants = predict.constants()
    touch = replace(constants["collective_touch"], value=0.5)
    for values in ({**constants, "collective_touch": touch}, {}):
        monkeypatch.setattr(predict, "constants", lambda found=values: found)
        keys.add(predict._key(run, PROFILE))
    assert len(keys) == 1 + len(fields) + 4 + 2
    fit = replace(constants["streaming"], value=0.5)
    monkeypatch.setattr(predict, "constants", lambda: {**constants, "streaming": fit})
    assert predict._key(run, PROFILE) == first, "the profile says what is fitted"
    monkeypatch.setattr(predict, "source_digest", lambda *_: "edited")
    assert predict._key(run, PROFILE) != first
