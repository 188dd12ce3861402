"""What answers say of themselves: one rule of confidence, the block of the report, its page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.report import limits
from shardwright.orchestrator.report.goodput import assumed
from shardwright.orchestrator.report.limits import (
    STATEMENTS,
    Asked,
    asked,
    confidence,
    limits_section,
)
from shardwright.sim_cluster.calibration import Fitted, constants
from shardwright.sim_cluster.timing.sensitivity import assumptions

PAGE = Path(__file__).parents[2] / "docs" / "model.md"


def about(machine: str, strategy: str, **mesh: int) -> Asked:
    job = load(None, [f"strategy.name={strategy}"])
    return asked(job, load_target(machine), mesh, is_published=True)


@pytest.fixture(autouse=True)
def documented_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is fitted to training runs today."""
    own = {name: dataclasses.replace(one, fitted_on="") for name, one in constants().items()}
    fitted = own | {"collective_touch": constants()["collective_touch"]}
    monkeypatch.setattr(limits, "constants", lambda: fitted)


@pytest.mark.parametrize(
    ("machine", "strategy", "mesh", "why"),
    [
        ("trn1n.32xlarge", "generic", {"dp_replicate": 32}, "on this machine"),
        ("trn1.32xlarge", "fsdp", {"dp_shard": 32}, "shards weights"),
        ("trn1.32xlarge", "generic", {"dp_replicate": 8, "cp": 4}, "context or expert"),
    ],
)
def test_answers_of_a_kind_nobody_published_are_extrapolated(
    machine: str, strategy: str, mesh: Mapping[str, int], why: str
) -> None:
    found = confidence(about(machine, strategy, **mesh))
    assert found.text == "extrapolated"
    assert why in found.why


@pytest.mark.parametrize(
    ("machine", "strategy", "mesh"),
    [
        ("trn2.48xlarge", "generic", {"dp_replicate": 32}),
        ("trn1.32xlarge", "generic", {"cp": 4}),
        ("trn1.32xlarge", "fsdp", {"dp_shard": 32}),
    ],
)
def test_where_no_run_is_of_the_kind_settings_are_not_what_is_missing(
    machine: str, strategy: str, mesh: Mapping[str, int]
) -> None:
    """One reason: the machine, an axis, or what is shared."""
    job = load(None, [f"strategy.name={strategy}"])
    found = confidence(asked(job, load_target(machine), mesh, is_published=False))
    assert found.text == "extrapolated"
    assert ";" not in found.why and "settings" not in found.why


def test_axes_of_a_step_s_own_are_not_taken_for_those_of_a_library() -> None:
    """A step may call any axis of its own `cp`, or `tp`."""
    for axes in ({"data": 8, "model": 4}, {"cp": 8}, {"tp": 8}):
        found = confidence(about("trn1.32xlarge", "manual", **axes))
        assert found.why == "none has shardings of its own"
    assert confidence(about("trn1.32xlarge", "manual")).text == "documented"


def test_other_answers_name_the_rows_of_the_constants_that_enter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parallel = about("trn1.32xlarge", "generic", dp_replicate=32, tp=1)
    found = confidence(parallel)
    assert found.text.startswith("calibrated on collectives.csv, group trn1-8r-plot")
    assert found.why == "through collective_touch"
    alone = about("trn1.32xlarge", "generic", dp_replicate=1)
    assert confidence(alone).text == "documented"
    fitted = dict(limits.constants())
    streaming: Fitted = dataclasses.replace(fitted["streaming"], fitted_on="training.csv, T1")
    monkeypatch.setattr(limits, "constants", lambda: fitted | {"streaming": streaming})
    assert confidence(alone).text == "calibrated on training.csv, T1"
    assert confidence(parallel).why == "through streaming, collective_touch"


def test_a_run_over_all_axes_of_published_runs_is_of_their_kind() -> None:
    """Two stages, two replicas, two shards, four ways of tensors: 32 cores."""
    four = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 4}
    found = about("trn1.32xlarge", "generic", **four)
    assert found.axes == tuple(four)
    assert found.has_measured_axes and confidence(found).text != "extrapolated"
    assert not about("trn1.32xlarge", "generic", **four, ep=2).has_measured_axes


def test_zero_two_shards_more_than_published_runs_do() -> None:
    job = load(None, ["strategy.name=generic", "strategy.zero=2"])
    mesh = {"dp_shard": 32}
    assert (
        confidence(asked(job, load_target("trn1.32xlarge"), mesh, is_published=True)).text
        == "extrapolated"
    )
    job = load(None, ["strategy.name=generic", "strategy.zero=1"])
    assert (
        confidence(asked(job, load_target("trn1.32xlarge"), mesh, is_published=True)).text
        != "extrapolated"
    )


@pytest.mark.parametrize(
    ("settings", "is_published"),
    [
        ((), True),
        (("cluster.profile=peak", "run.steps=2", "goal.tokens=1T"), True),
        (("strategy.sequence_parallel=false",), False),
        (("compiler.attention=unfused",), False),
        (("cluster.runtime=2023",), False),
        (("mesh.tp=8", "mesh.dp_shard=128"), False),
        (("model.seq_len=4096",), False),
    ],
)
def test_only_a_published_run_is_calibrated(settings: tuple[str, ...], is_published: bool) -> None:
    job = load(None, ["model.recipe=llama3.1-8b-32n-zero1", *settings])
    found = asked(job, load_target("trn1.32xlarge"), {"dp_shard": 32, "tp": 32})
    assert found.is_published is is_published
    text, why = (one := confidence(found)).text, one.why
    assert text.startswith("calibrated on") is is_published
    assert is_published or why == "no published run has its settings (--recipe)"


def test_a_job_like_a_published_run_is_none() -> None:
    """The same model, mesh and machine, with other settings than those of its script."""
    job = load(None, ["model.preset=llama3-8b", "strategy.name=llm-training", "strategy.zero=1"])
    mesh = {"dp_shard": 32, "tp": 32}
    assert confidence(asked(job, load_target("trn1.32xlarge"), mesh)).text == "extrapolated"


def test_the_block_says_what_holds_and_what_is_assumed() -> None:
    section = limits_section(about("trn1n.32xlarge", "fsdp", dp_shard=32), "nominal", {})
    said = [one["short"] for one in section["cannot_tell"]]
    assert "none shards weights (FSDP)" in said
    assert "none has context or expert parallelism" not in said
    whole = limits_section(about("trn1n.32xlarge", "fsdp", tp=32), "nominal", {})
    assert "none shards weights (FSDP)" not in [one["short"] for one in whole["cannot_tell"]]
    assumed = {one["name"]: one for one in section["assumed"]}
    assert assumed["cross_engine_semaphore_ns"]["status"] == "unknown"
    assert "dma_fixed_ns" not in assumed, "a page documents it"
    assert all(one["source"] for one in section["assumed"])


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ((), ("instance_mtbf_hours", "restart_s", "storage_gb_per_s")),
        (("instance_mtbf_hours=5000", "storage_gb_per_s=4"), ("restart_s",)),
        (("checkpoint_s=30", "restart_s=60"), ("instance_mtbf_hours",)),
        (("checkpoint_interval_s=600", "storage_gb_per_s=4"), ("instance_mtbf_hours", "restart_s")),
    ],
)
def test_figures_of_goodput_that_nobody_gave_are_assumed(
    settings: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """A rate of storage does not enter where the job says how long saving takes."""
    given = load(None, [f"goodput.{text}" for text in settings]).goodput
    section = limits_section(about("trn1.32xlarge", "fsdp", tp=32), "nominal", assumed(given))
    own = [one for one in section["assumed"] if one["name"].startswith("goodput.")]
    assert [one["name"] for one in own] == [f"goodput.{name}" for name in names]
    assert section["assumed"][-len(own) :] == own and {one["status"] for one in own} == {"unknown"}
    assert all(one["value"] == getattr(given, one["name"].partition(".")[2]) for one in own)


def test_the_page_has_every_statement_and_every_figure() -> None:
    """`benchmarks/sensitivity.py` writes it; a statement or a figure that is new is missing. Values
    are those of files; fitted ones are the calibration's to say.
    """
    page = PAGE.read_text()
    assert [one.short for one in STATEMENTS if one.text not in page] == []
    rows = [
        f"| `{name}` |" + ("" if name in constants() else f" {fact.value} | {fact.status} |")
        for name, fact in assumptions(load_target("trn1n.32xlarge")).items()
    ]
    assert [row for row in rows if row not in page] == []
