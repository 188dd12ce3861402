"""A job whose step brings its own mesh: `strategy.name = "manual"` from the command line, run in
values on all cores of a machine, and refused when `[mesh]` or the cluster contradict the step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main

ENTRY = """
from tests.support.annotated import annotated_task


def task():
    return annotated_task("jit", data=16, model=2)
"""
JOB = """
[model]
entry = "own_mesh_job:task"
[strategy]
name = "manual"
global_batch = 16
[cluster]
target = "trn1.32xlarge"
[run]
executor = "inline"
"""


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    (tmp_path / "own_mesh_job.py").write_text(ENTRY)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    folders = (f"cache.dir={tmp_path / 'cache'}", f"output.dir={tmp_path / 'out'}")
    return [str(path), *(word for folder in folders for word in ("--set", folder)), "--json"]


def test_the_steps_mesh_is_run_in_values(job: list[str], capsys) -> None:
    assert main(["run", *job]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mesh"] == {"data": 16, "model": 2} and report["cores"] == 32
    assert report["numerics"]["passed"] and report["numerics"]["worst_param_error"]["error"] < 1e-5
    assert "SW_MANUAL_OPEN" in {f["code"] for f in report["findings"]}
    assert any(row["axis"] == "model" for row in report["collectives"])


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (("--mesh", "tp=32"), "SW_MANUAL_MESH", "data=16,model=2, got tp=32"),
        (("--instances", "2"), "SW_MESH_PRODUCT", "16 * 2 = 32 cores, target has 64"),
        (("--global-batch", "24"), "SW_BATCH", "got 24"),
    ],
)
def test_contradictions_are_refused(
    job: list[str], change: tuple[str, str], code: str, said: str, capsys
) -> None:
    assert main(["plan", *job, *change]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == code and said in error["message"]
