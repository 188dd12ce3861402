"""A step that comes as a file: the same plan as the step itself, whatever the form of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from shardwright.compiler.frontend.state import state_tree
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config
from shardwright.orchestrator.road import plan_cache
from tests.support.cells import long_in_matrix
from tests.support.small_job import small_llama

FORMS = ("stablehlo", "hlo", "donated")
SAMPLES = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small llama's step, lowered, in several forms, and as an entry."""
    where = tmp_path_factory.mktemp("lowered")
    task = small_llama()
    state, batch = state_tree(task).arrays, task.batch(SAMPLES)
    lowered = (
        jax.jit(task.step, keep_unused=True).trace(*state, batch).lower(lowering_platforms=("cpu",))
    )
    (where / "stablehlo.mlir").write_text(lowered.as_text())
    (where / "hlo.txt").write_text(lowered.as_text(dialect="hlo"))
    donated = jax.jit(task.step, donate_argnums=(0, 1), keep_unused=True)
    (where / "donated.mlir").write_text(donated.lower(*state, batch).as_text())
    (where / "small_entry.py").write_text(
        "from tests.support.small_job import small_llama\n\ndef make():\n    return small_llama()\n"
    )
    return where


def plan(folder: Path, model: str, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    """(exit code, report) of `plan` on one instance."""
    settings = ("run.tries=0", "run.executor=inline")
    words = [*(w for s in settings for w in ("--set", s)), "--json", *more]
    code = main(["plan", "--model", model, *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def known(folder: Path) -> dict[str, Any]:
    """The report of the entry."""
    job = folder / "job.toml"
    job.write_text('[model]\nentry = "small_entry:make"\n')
    return plan_cache.plan(config.load(job, ["run.executor=inline"]))


@pytest.mark.parametrize("form", long_in_matrix(FORMS, ("stablehlo", "hlo")))
def test_a_lowered_step_is_planned_as_the_step_is(folder, known, form, capsys) -> None:
    (file,) = folder.glob(f"{form}.*")
    code, report = plan(folder, str(file), capsys)
    assert code == 0 and report["graph"]["name"] == form
    assert report["graph"]["params"] == known["graph"]["params"]
    assert report["batch"] == known["batch"]
    named = [r["memory"]["argument_bytes"] for r in (report, known)]
    for category in ("parameters", "gradients", "optimizer"):
        assert named[0][category] == named[1][category]
    if form != "hlo":  # whose loops XLA's conversion writes in another way
        assert report["memory"]["categories"] == known["memory"]["categories"]
        assert report["timing"]["step_time_ps"] == known["timing"]["step_time_ps"]


def test_samples_are_those_of_the_file(folder, capsys) -> None:
    code, report = plan(folder, str(folder / "stablehlo.mlir"), capsys, "--micro-batch", "2")
    assert code == 2 and report["error"]["code"] == "SW_BATCH"
    assert "a step of 32 samples" in report["error"]["message"]


def test_what_is_no_training_step_is_refused(folder, capsys) -> None:
    forward = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((4, 4), "float32"))
    file = folder / "forward.mlir"
    file.write_text(forward.as_text())
    code, report = plan(folder, str(file), capsys)
    assert code == 2 and report["error"]["code"] == "SW_MODULE_STEP"
    assert "shardwright compile" in report["error"]["hint"]


def test_a_file_that_is_not_there(folder, capsys) -> None:
    code, report = plan(folder, str(folder / "none.mlir"), capsys)
    assert code == 2 and report["error"]["code"] == "SW_MODEL"


def test_a_lowered_step_has_no_values(folder, capsys, tmp_path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\nhlo = "{folder / "stablehlo.mlir"}"\n')
    assert (
        main(["run", str(job), "--executor", "inline", "--out", str(tmp_path / "out"), "--json"])
        == 2
    )
    assert json.loads(capsys.readouterr().out)["error"]["code"].startswith("SW_")
