"""`plan` asked again: answered without jax and ray, and never for a model that has changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.model import source_files
from shardwright.orchestrator.road.plan_cache import plan, plan_key
from shardwright.orchestrator.whatif.journal import Journal
from shardwright.orchestrator.whatif.points import Point
from shardwright.orchestrator.whatif.sweep import sweep
from tests.support.small_job import write_job

ROOT = Path(__file__).resolve().parents[2]
ASK = """
import sys
from shardwright.orchestrator import cli
code = cli.main(["plan", sys.argv[1], "--executor", "inline", *sys.argv[2:]])
heavy = ("jax", "jaxlib", "ray", "matplotlib", "torch", "optax", "numpy", "shardwright.compiler.ir")
print(*(name for name in heavy if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "as_json", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["screen", "json"]
)
def test_a_cached_answer_imports_nothing_heavy(tmp_path: Path, capsys, as_json: bool) -> None:
    """With its tries: they are cached with it."""
    job = write_job(tmp_path, run={"tries": 1})
    words = [str(job), *(["--json"] if as_json else [])]
    assert main(["plan", *words, "--executor", "inline"]) == 0
    first = capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-c", ASK, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "\n")
    if as_json:
        answers = [json.loads(text) for text in (first, done.stdout)]
        for answer in answers:
            assert answer["whatif"]["tried"] and answer.pop("provenance")
        assert "stored_s" not in answers[0]["whatif"] and answers[1]["whatif"].pop("stored_s") > 0
        assert answers[0] == answers[1]
    else:
        shown = [_told(text) for text in (first, done.stdout)]
        assert shown[0][1:] == shown[1][1:]
        assert re.search(r"─ stored, \d+ \w+ old: --fresh asks anew$", shown[1][0])
        assert not shown[0][0].endswith("anew")


def _told(text: str) -> list[str]:
    """The lines of a screen, without the parts that say how it was answered."""
    kept: list[str] = []
    drops = False
    for line in text.splitlines():
        drops = line.startswith(("answered", "stored")) or (drops and line.startswith(" "))
        kept += [] if drops else [line]
    return kept


STEP = """
import jax
import jax.numpy as jnp
from shardwright.compiler.frontend.task import TrainTask
from parts.sizes import WIDTH

def make():
    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state, {"loss": value}
    return TrainTask(
        step=step,
        state=({"w": jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)}, {}),
        batch=lambda n: {"x": jax.ShapeDtypeStruct((n, 64), jnp.float32)},
    )
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A job of the user's own step, which imports a module of a package in its folder."""
    (tmp_path / "own_model.py").write_text(STEP)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "sizes.py").write_text("WIDTH = 64\n")
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nentry = "own_model:make"\n[run]\ntries = 0\nexecutor = "inline"\n'
        f'[cache]\ndir = "{tmp_path / "cache"}"\n'
    )
    return job


def answer(job: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """From a process of its own, as an edited module is only read by a new one."""
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "plan", str(job), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_an_edited_model_is_planned_again(own: Path, capsys) -> None:
    """Also when only a module that it imports was edited."""
    before = answer(own, capsys)
    assert before["graph"]["params"] == 64 * 64
    (own.parent / "parts" / "sizes.py").write_text("WIDTH = 96\n")
    after = answer(own, capsys)
    assert after["graph"]["params"] == 64 * 96
    assert "cached plan" not in after["provenance"]["stages_s"]
    assert "cached plan" in answer(own, capsys)["provenance"]["stages_s"]


READER = """
import json
from pathlib import Path

import jax
import own_model
from bench_widths import WIDTH

def make():
    assert Path(__file__).with_name("sizes.json").exists()
    task = own_model.make()
    width = json.loads(Path(__file__).with_name("sizes.json").read_text())["width"]
    weight = jax.ShapeDtypeStruct((WIDTH, width), task.state[0]["w"].dtype)
    return own_model.TrainTask(step=task.step, state=({"w": weight}, {}), batch=task.batch)
"""


def test_data_that_a_model_reads_and_modules_from_elsewhere_count(
    own: Path, tmp_path_factory, monkeypatch
) -> None:
    """Neither is known before the first capture; afterwards an edit is never missed, by `plan` or
    by a sweep that goes on."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "bench_widths.py").write_text("WIDTH = 64\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    (own.parent / "reader_model.py").write_text(READER)
    data = own.parent / "sizes.json"
    data.write_text('{"width": 64}')
    job = config.load(own, ["model.entry=reader_model:make"])
    journal = Journal(own.parent / "points.jsonl")

    def swept() -> tuple[int, float]:
        found = sweep([Point({}, job)], job, journal, lambda *_: None)
        return found.known, found.rows[0].metrics["peak_gib"]

    _, narrow = swept()
    assert plan(job)["graph"]["params"] == 64 * 64
    assert swept() == (1, narrow)
    key = plan_key(job)
    data.write_text('{"width": 512}')
    wide = plan(job)
    assert wide["graph"]["params"] == 64 * 512
    known, peak = swept()
    assert known == 0 and peak == wide["memory"]["peak_bytes"] / 2**30 != narrow
    data.write_text('{"width": 64}')
    assert plan_key(job) == key  # the old answer is the right one again
    (elsewhere / "bench_widths.py").write_text("WIDTH = 64  # edited\n")
    assert plan_key(job) != key
    data.unlink()
    with pytest.raises(UsageError, match=r"reader_model.py:10.*SW_TASK_RAISED.*AssertionError"):
        plan(job)


def test_what_a_plan_depends_on(own: Path, tmp_path_factory, monkeypatch) -> None:
    """The module of an entry, in its own folder or in a package elsewhere; no package that the
    model does not import."""
    assert [path.name for path in source_files(config.load(own))] == ["own_model.py"]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "farther").mkdir()
    (elsewhere / "farther" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    job = config.load(own, ["model.entry=farther.train:make"])
    key = plan_key(job)
    (elsewhere / "farther" / "train.py").write_text("")
    other = plan_key(job)
    (elsewhere / "something-1.2.dist-info").mkdir()
    last = plan_key(job)
    assert key != other == last
    brought = elsewhere / "farther" / "brought_along"
    (brought / "other-3.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(brought))  # as `import ray` does
    assert plan_key(job) == last
