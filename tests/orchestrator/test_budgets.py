"""Budgets of jobs: what `compile` refuses, `run` refuses and `plan` reports, with its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.linking import budget
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.road.budgets import wider_text
from shardwright.orchestrator.road.plan_cache import exit_code
from tests.support.machines import machine_file
from tests.support.small_job import write_job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], verb: str, job: Path, *sets: str) -> tuple[int, Any]:
    """(exit code, JSON) of a verb."""
    capsys.readouterr()
    words = [w for text in sets for w in ("--set", text)]
    code = main([verb, str(job), "--executor", "inline", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def codes(report: Any, severity: str) -> set[str]:
    return {f["code"] for f in report["findings"] if f["severity"] == severity}


@pytest.mark.parametrize(
    ("fits", "severities", "code"),
    [
        (True, (), 0),
        (True, ("warning", "info"), 0),
        (True, ("warning", "error"), 70),
        (False, ("error",), 71),
    ],
)
def test_a_plan_ends_with_the_code_of_the_budget_that_is_broken(
    fits: bool, severities: tuple[str, ...], code: int
) -> None:
    findings = [{"severity": severity} for severity in severities]
    assert exit_code({"memory": {"fits": fits}, "findings": findings}) == code


@pytest.mark.matrix
def test_an_instruction_limit_the_user_sets_is_kept(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = answer(capsys, "plan", job, "compiler.instruction_limit=100")
    assert code == 70 and "NCC_EBVF030" in codes(report, "error")
    (first, *_) = (f for f in report["findings"] if f["code"] == "NCC_EBVF030")
    assert "the limit is 100" in first["message"] and "-O1" in first["hint"]
    code, failed = answer(capsys, "run", job, "compiler.instruction_limit=100")
    assert code == 70 and failed["error"]["code"] == "NCC_EBVF030"
    assert [path.name for path in (job.parent / "out").iterdir()] == ["events.jsonl"]
    code, report = answer(capsys, "plan", job)
    assert code == 0 and not codes(report, "error")


def test_an_operator_over_the_documented_limit_is_a_warning_at_the_users_line(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "OPERATOR_LIMIT", 50)
    code, report = answer(capsys, "plan", job)
    assert code == 0
    found = [f for f in report["findings"] if f["code"] == "NCC_EXTP004"]
    assert found and all(f["severity"] == "warning" for f in found)
    assert any(f["loc"] and f["loc"]["file"].endswith(".py") and f["loc"]["line"] for f in found)
    assert all("requires" in f["message"] and "limit is 50" in f["message"] for f in found)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ((), "mesh.dp_shard=64 cluster.instances=2 strategy.global_batch=64"),
        (
            ("mesh.dp_shard=auto", "mesh.tp=8", "strategy.global_batch=16", "cluster.instances=2"),
            "mesh.dp_shard=16 mesh.tp=8 cluster.instances=4 strategy.global_batch=16",
        ),
        (
            ("mesh.dp_replicate=4", "mesh.dp_shard=8", "mesh.ep=2"),
            "mesh.dp_replicate=4 mesh.dp_shard=16 mesh.ep=2 cluster.instances=2"
            " strategy.global_batch=64",
        ),
        (
            (
                "strategy.global_batch_tokens=131072",
                "strategy.micro_batch=2",
                "mesh.dp_shard=auto",
                "mesh.tp=2",
            ),
            "mesh.dp_shard=32 mesh.tp=2 cluster.instances=2 strategy.global_batch=32"
            " strategy.micro_batch=1 strategy.global_batch_tokens=0",
        ),
        (("cluster.target=trn1.2xlarge",), ""),
        (("strategy.name=manual",), ""),
    ],
)
def test_twice_the_cores_are_asked_for_as_they_are_typed(
    settings: tuple[str, ...], flags: str
) -> None:
    """Mesh, instances and batch, which are taken as they are."""
    asked = load(None, ["model.preset=llama2-7b", *settings])
    layout = layout_of(asked, tokens_per_sample=4096)
    told = wider_text(asked, layout).split()
    assert told[::2] == ["--set"] * len(flags.split()) and told[1::2] == flags.split()
    wide = load(None, ["model.preset=llama2-7b", *settings, *told[1::2]])
    again = layout_of(wide, tokens_per_sample=4096)
    assert again.mesh.num_cores == layout.mesh.num_cores * (2 if flags else 1)


def test_a_lowered_step_has_its_samples_and_no_more_cores() -> None:
    asked = load(None, ["model.hlo=step.mlir"])
    assert wider_text(asked, layout_of(asked)) == ""


def test_tensors_over_the_memory_of_a_core_are_named(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.compiler.machine.target.Target.limit_bytes", 4000)
    code, report = answer(capsys, "plan", job)
    assert code == 71
    assert {"SW_CAPACITY", "NCC_EVRF009"} <= codes(report, "error")
    code, failed = answer(capsys, "run", job)
    assert code == 71 and failed["error"]["code"] == "SW_CAPACITY"
    assert "largest:" in failed["error"]["message"] and "4000 bytes" in failed["error"]["message"]


@pytest.mark.matrix
def test_tiles_over_sbuf_name_kernel_tile_and_limit(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = machine_file(job.parent, sbuf_bytes_per_partition=64)
    for verb in ("plan", "run"):
        code, failed = answer(capsys, verb, job, f"cluster.target={tiny}")
        assert code == 71 and failed["error"]["code"] == "SW_SBUF_CAPACITY"
        message = failed["error"]["message"]
        assert "kernel" in message and ", tile" in message and message.endswith("limit is 64")
