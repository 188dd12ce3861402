"""The Python API: the command's verbs with typed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.diagnostics import UsageError
from orchestrator import api
from orchestrator.cli import main
from tests.support.small_job import SIZES

JOB = """
[model]
config = "config.json"
seq_len = 8
[mesh]
dp_shard = 2
[run]
executor = "inline"
tries = 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def test_a_plan_is_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = api.plan("job.toml", cluster__target="trn1.2xlarge")
    words = ["plan", "job.toml", "--target", "trn1.2xlarge", "--json"]
    assert main(words) == plan.exit_code == 0
    told = json.loads(capsys.readouterr().out)
    assert plan.data["timing"] == told["timing"]
    assert plan.step_time_s == told["timing"]["step_time_s"] > 0
    assert plan.fits and plan.peak_bytes > 0 and 0 < plan.mfu < 1
    assert plan.band_s[0] <= plan.step_time_s <= plan.band_s[1]
    assert plan.losses == ()


def test_jobs_compile_together(folder: Path) -> None:
    (folder / "other.toml").write_text(JOB)
    target = {"cluster__target": "trn1.2xlarge"}
    summary = api.compile_only(["job.toml", Path("other.toml")], **target)
    assert summary.exit_code == 0 and len(summary.jobs) == 2
    one, two = summary.jobs
    assert one.units == two.units == summary.units
    assert (Path(one.bundle) / "manifest.neff").exists()
    alone = api.compile_only(api.job("job.toml", output__dir="alone", **target))
    assert alone.units.cached == alone.units.total == summary.units.total
    assert alone.jobs[0].bundle == str(folder / "alone" / "bundle")


def test_settings_are_checked(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown key run\.stepz"):
        api.job("job.toml", run__stepz=3)
    with pytest.raises(UsageError, match=r"--set requires table.key=value"):
        api.job("job.toml", steps=3)
    with pytest.raises(TypeError, match="path of a job file"):
        api.plan(api.job("job.toml"), run__seed=1)
