"""The Python API: the command's verbs with typed results."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright
from shardwright.compiler.diagnostics import CompileError, UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator import api
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.host import PACKAGES_ROOT
from shardwright.orchestrator.report.page.page import report_page
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
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.mark.matrix
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


def made_here(width: int) -> TrainTask:
    """A step of no module: what a cell of a notebook makes."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state, {"loss": value}

    return TrainTask(
        step=step,
        state=({"w": jax.ShapeDtypeStruct((64, width), jnp.float32)}, {}),
        batch=lambda n: {"x": jax.ShapeDtypeStruct((n, 64), jnp.float32)},
    )


ON_ONE_CHIP = {"cluster__target": "trn1.2xlarge", "mesh__dp_shard": 2, "run__executor": "inline"}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[api.Report]:
    """Of a task, another one, and the first again."""
    settings = ON_ONE_CHIP | {"cache__dir": str(tmp_path_factory.mktemp("cache"))}
    return [api.plan(made_here(width), **settings) for width in (64, 32, 64)]


def test_a_task_is_planned_as_it_is(plans: list[api.Report]) -> None:
    first, other, again = plans
    assert [p.data["graph"]["params"] for p in (first, other, again)] == [4096, 2048, 4096]
    assert "stored_s" not in other.data["provenance"], "another step is another question"
    assert again.data["provenance"]["stored_s"] > 0 and again.step_time_s == first.step_time_s
    assert first.data["job"]["model"]["entry"] == "" and first.fits

    told = repr(again).splitlines()
    assert len(told) >= 12 and max(map(len, told)) <= 80
    assert told[0].startswith("step  ") and any(line.startswith("memory ") for line in told)
    assert any(line.endswith("ask anew: cache__fresh=True") for line in told)
    shown = again._repr_html_()
    page = html.unescape(shown.removeprefix('<iframe srcdoc="').partition('" style="')[0])
    assert page == report_page(again.data) and shown.endswith("</iframe>")
    assert '"' not in shown.removeprefix('<iframe srcdoc="').partition('" style="')[0]


def test_a_step_is_planned_as_it_is_called(
    plans: list[api.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same step as `plans` have, decorated or not, shown by arrays."""
    made = made_here(64)
    params, batch = {"w": jnp.ones((64, 64))}, {"x": jnp.ones((2, 64))}
    settings = ON_ONE_CHIP | {"cache__dir": str(tmp_path)}
    report = api.plan(made.step, params, batch=batch, opt_state={}, **settings)
    assert report.step_time_s == plans[0].step_time_s and report.data["graph"]["told"] == []
    assert "parameters params" in repr(report)
    step = shardwright.train_step(made.step, example=lambda: (params, {}, batch), name="mine")
    other = api.plan(step, **settings | {"strategy__micro_batch": 2})
    assert other.data["graph"]["name"] == "mine"
    assert other.data["graph"]["told"] == ["4 samples; the example has 2 (strategy.micro_batch=1)"]
    assert "step       mine: 4 samples; the example has 2" in repr(other)
    for given, planned in ((8, 8), (3, 2)):  # what the ranks share evenly, else one for each
        shown = api.plan(made.step, params, {}, {"x": jnp.ones((given, 64))}, **settings)
        assert shown.data["batch"]["global_batch"] == planned
    assert shown.data["graph"]["told"] == ["2 samples; the example has 3 (no multiple of 2)"]
    assert float(step(params, {}, batch)[2]["loss"]) == 64**2
    for asked, arguments, error in (
        (made.step, (), "requires arguments to show it by"),
        (step, (params,), "missing a required argument"),
    ):
        with pytest.raises(UsageError, match=error) as caught:
            api.plan(asked, *arguments, **settings)
        assert caught.value.code == "SW_STEP_EXAMPLE"
    with pytest.raises(TypeError, match="requires a step to plan"):
        api.plan(made, params)


def test_a_task_is_its_own_model_and_of_this_process_alone() -> None:
    with pytest.raises(UsageError, match=r"got model\.preset"):
        api.plan(made_here(8), model__preset="llama2-7b")
    with pytest.raises(UsageError, match=r"SW_MODEL.*TrainTask") as refused:
        api.run(made_here(8))
    assert "model__entry" in refused.value.diagnostic.hint


def test_a_run_shows_its_values(plans: list[api.Report]) -> None:
    """What is wrong first, then the screen, then losses."""
    apart = {"error": 0.5, "allowed": 1e-5}
    numerics = {
        "passed": False,
        "steps": 2,
        "losses": [5.0, 4.0],
        "parts": None,
        "worst_loss": {"step": "step 2", **apart},
        "worst_param_error": {"leaf": "params/w", **apart},
        "worst_l0": None,
        "undecided": ["params/k", "params/b"],
        "rounding": None,
    }
    told = repr(api.Report({**plans[0].data, "numerics": numerics}, 72)).splitlines()
    assert told[0].startswith("error      SW_VALUES") and len(told) <= 36
    assert any(line.startswith("values     loss 5.0000 -> 4.0000 in 2 steps") for line in told)
    assert "rounding alone changes all of params/k, params/b" in " ".join(" ".join(told).split())


@pytest.mark.matrix
def test_a_run_is_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"cluster__target": "trn1.2xlarge", "run__steps": 2, "run__compare": False}
    run = api.run("job.toml", output__dir="out", **settings)
    assert run.exit_code == 0 and run.data["numerics"]["passed"]
    assert run.losses == tuple(run.data["numerics"]["losses"]) and len(run.losses) == 2
    assert run.fits and run.peak_bytes > 0 and 0 < run.mfu < 1
    assert run.band_s[0] <= run.step_time_s <= run.band_s[1]
    told = capsys.readouterr()
    assert not told.out and not told.err, "nothing is printed where there is no terminal"

    words = ["run", "job.toml", "--target", "trn1.2xlarge", "--steps", "2", "--out", "command"]
    assert main([*words, "--no-compare", "--json"]) == 0
    command = json.loads(capsys.readouterr().out)
    for section in ("numerics", "timing", "memory", "programs"):
        assert json.loads(json.dumps(run.data[section])) == command[section], section

    def files(out: str) -> set[str]:
        return {str(path.relative_to(folder / out)) for path in (folder / out).rglob("*")}

    assert files("out") == files("command") >= {"report.json", "report.html", "trace.json"}
    written = json.loads((folder / "out" / "report.json").read_text())
    assert written == json.loads(json.dumps(run.data))
    assert Path(run.data["provenance"]["files"]["bundle"]) == folder / "out" / "bundle"


@pytest.mark.matrix
def test_a_run_on_another_thread_is_the_same(folder: Path) -> None:
    asked = api.job("job.toml", cluster__target="trn1.2xlarge", run__compare=False)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(api.run, asked).result()
    assert there.losses == api.run(asked).losses
    assert there.data["numerics"]["worst_param_error"] is None


def test_a_run_that_is_refused_raises(folder: Path) -> None:
    target = {"cluster__target": "trn1.2xlarge"}
    with pytest.raises(CompileError) as caught:
        api.run("job.toml", compiler__instruction_limit=10, **target)
    assert caught.value.exit_code == 70
    (folder / "file").write_text("")
    with pytest.raises(UsageError) as refused:
        api.run("job.toml", output__dir="file/out", **target)
    assert refused.value.code == "SW_OUTPUT" and refused.value.diagnostic.hint


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


SCRIPT = """
from shardwright.orchestrator import api
print("begins")
run = api.run("job.toml", cluster__target="trn1.2xlarge", output__dir="out")
print("ends", run.exit_code)
"""


@pytest.mark.matrix
def test_a_script_needs_no_guard(folder: Path) -> None:
    """No process that a run starts runs the script again."""
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        env={**os.environ, "PYTHONPATH": str(PACKAGES_ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "begins\nends 0\n"), done.stderr


def test_settings_are_checked(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown key run\.stepz"):
        api.job("job.toml", run__stepz=3)
    with pytest.raises(UsageError, match=r"--set requires table.key=value"):
        api.job("job.toml", stepz=3)
    with pytest.raises(TypeError, match="path of a job file"):
        api.plan(api.job("job.toml"), run__seed=1)
