"""The first command: `make run` installs what the command needs, and the main job shows what it
says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples" / "llama_fsdp" / "job.toml"


def told(target: str, venv: Path) -> str:
    """What `make` would run for a target where nothing is installed."""
    words = ["make", "--no-print-directory", "-n", target, f"VENV={venv}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_main_job_does_not_wait_for_what_only_tests_need(tmp_path: Path) -> None:
    run, test = (told(target, tmp_path / "venv") for target in ("run", "test"))
    assert "pip install" in run and "dev" not in run and "shardwright run" in run
    assert run.splitlines()[0].startswith("echo")  # progress, before anything takes its time
    assert test.count("pip install") == 1 and "-e '.[dev]'" in test


def test_nothing_of_the_tests_is_among_what_the_command_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ("pytest", "hypothesis", "mypy", "ruff", "moto", "flax"):
        assert not any(row.startswith(name) for row in project["dependencies"]), name
        assert any(row.startswith(name) for row in project["optional-dependencies"]["dev"]), name


@pytest.mark.ray
@pytest.mark.matrix
def test_the_main_job(tmp_path: Path) -> None:
    """As `make run` runs it, with an empty cache; nothing on stderr is to be ignored."""
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "run", str(JOB), "--out", str(tmp_path / "out")],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if not re.match(r" *\d+\.\ds ", line)] == []
    assert float(lines[0].split("s ")[0]) < 1 and "loads" in lines[0]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["cores"], report["mesh"]) == (32, {"dp_shard": 32})
    assert "2 micro-batches" in " ".join(done.stdout.split())
    assert {row["worker"].partition("-")[0] for row in report["units"]} == {"ray"}
    numerics = report["numerics"]
    losses, reference = numerics["losses"], numerics["reference_losses"]
    assert len(losses) == len(reference) == numerics["steps"] == 20
    assert losses[0] - losses[-1] >= 2
    assert numerics["passed"] and numerics["bound"] == 1e-5
    assert 0 < numerics["worst_param_error"]["error"] <= 1e-5
    assert len(numerics["l0"]) == 3 and all(0 < e <= 1e-5 for e in numerics["l0"].values())
