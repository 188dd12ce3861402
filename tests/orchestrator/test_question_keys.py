"""Which question an answer belongs to: inside a process that goes on, and across processes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from shardwright.orchestrator import api
from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.road.plan_cache import KIND, plan, plan_key
from shardwright.orchestrator.road.stages import Stages, Traces

ROOT = Path(__file__).resolve().parents[2]
STEP = """
import os

import jax
import jax.numpy as jnp
from shardwright.compiler.frontend.task import TrainTask

WIDTH = 64

def make():
    width = WIDTH
    def loss(params, batch):
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, (width,))
        return jnp.mean((batch["x"] @ params["w"] * kept) ** 2)
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state, {"loss": value}
    return TrainTask(
        step=step,
        state=({"w": jax.ShapeDtypeStruct((64, width), jnp.float32)}, {}),
        batch=lambda n: {"x": jax.ShapeDtypeStruct((n, 64), jnp.float32)},
    )
"""
FROM_ENVIRONMENT = STEP.replace("WIDTH = 64", 'WIDTH = int(os.environ.get("STEP_WIDTH", 64))')


def write(folder: Path, module: str, text: str = STEP) -> Path:
    """A job of the step as `module`, which no other test imports, on two cores."""
    (folder / f"{module}.py").write_text(text)
    job = folder / "job.toml"
    job.write_text(
        f'[model]\nentry = "{module}:make"\n[mesh]\ndp_shard = 2\n'
        '[cluster]\ntarget = "trn1.2xlarge"\n[run]\ntries = 0\nexecutor = "inline"\n'
        f'[cache]\ndir = "{folder / "cache"}"\n'
    )
    return job


def width(report: Any) -> int:
    """Which step was planned."""
    return int(report["graph"]["params"]) // 64


def is_stored(report: Any) -> bool:
    return "cached plan" in report["provenance"]["stages_s"]


def has_answer(job: JobConfig) -> bool:
    """Whether a new command would be answered from the cache."""
    return open_cache(job.cache).get(KIND, plan_key(job)) is not None


def ask(job: Path) -> Any:
    return api.plan(job).data


# Inside a process


def test_a_changed_variable_of_a_module_is_another_question(tmp_path: Path) -> None:
    job = write(tmp_path, "closed_over")
    assert width(ask(job)) == 64
    again = ask(job)
    assert width(again) == 64 and is_stored(again)
    module = importlib.import_module("closed_over")
    module.WIDTH = 96
    changed = ask(job)
    assert width(changed) == 96 and not is_stored(changed)
    module.WIDTH = 64
    assert is_stored(ask(job))
    assert not has_answer(config.load(job)), "no new command may be told what a process changed"


def test_another_function_of_main_is_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cell of a notebook that is run again."""
    job, main = write(tmp_path, "beside"), sys.modules["__main__"]
    job.write_text(job.read_text().replace("beside:make", "__main__:make"))
    found = []
    for text in (STEP, STEP.replace("WIDTH = 64", "WIDTH = 96"), STEP):
        cell: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, "<cell>", "exec"), cell)
        monkeypatch.setattr(main, "make", cell["make"], raising=False)
        found.append(ask(job))
    assert [width(report) for report in found] == [64, 96, 64]
    assert [is_stored(report) for report in found] == [False, False, True]


def test_an_edited_module_counts_once_it_is_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the question is the old one, and its answer is none about the edited file."""
    job = write(tmp_path, "edited_later")
    first = ask(job)
    (tmp_path / "edited_later.py").write_text(STEP.replace("WIDTH = 64", "WIDTH = 128"))
    same = ask(job)
    assert width(same) == 64 and is_stored(same)
    assert same["provenance"]["plan_key"] == first["provenance"]["plan_key"]
    as_command = plan(config.load(job))
    assert as_command["provenance"]["plan_key"] != plan_key(config.load(job))
    assert not has_answer(config.load(job))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.reload(importlib.import_module("edited_later"))
    assert width(ask(job)) == 128


def test_what_a_module_was_is_no_answer_about_its_file(tmp_path: Path) -> None:
    """For commands too, where somebody had imported it before they asked."""
    job = write(tmp_path, "there_before")
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module("there_before")
    finally:
        sys.path.remove(str(tmp_path))
    module.WIDTH = 96
    assert width(plan(config.load(job))) == 96
    assert not has_answer(config.load(job))


def test_settings_of_jax_are_in_the_question(tmp_path: Path) -> None:
    """Of the process, as of a command in it."""
    job, before = write(tmp_path, "with_settings"), jax.config.jax_default_prng_impl
    first, command = ask(job), plan(config.load(job))
    assert has_answer(config.load(job))
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        other = ask(job)
        job.write_text(job.read_text().replace("tries = 0", "tries = 0\nseed = 3"))
        changed = config.load(job, ["compiler.optlevel=1"])
        polluted = plan(changed)
        assert not has_answer(changed)
    finally:
        jax.config.update("jax_default_prng_impl", before)
    keys = {r["provenance"]["plan_key"] for r in (first, other, command, polluted)}
    assert len(keys) == 4 and not is_stored(other)
    assert other["timing"]["step_time_s"] != first["timing"]["step_time_s"]
    assert is_stored(ask(job)) and is_stored(plan(config.load(job)))


def test_captures_that_jobs_share_are_of_the_same_settings_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = STEP.replace("width = WIDTH", 'width = int(os.environ["SHARED_WIDTH"])')
    monkeypatch.setenv("SHARED_WIDTH", "64")
    job, traces = config.load(write(tmp_path, "shared_capture", text)), Traces()

    def traced() -> Any:
        return Stages(traces=traces).trace(job, traces.task(job), 4)

    first = traced()
    assert traced() is first
    monkeypatch.setenv("UNRELATED_WIDTH", "1")
    assert traced() is first
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        assert traced().digest != first.digest
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")
    assert traced().digest == first.digest
    monkeypatch.setenv("SHARED_WIDTH", "96")
    assert traced().digest != first.digest


def test_variables_that_a_module_read_when_it_was_imported_count_later_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another job of the same process, which does not import it again."""
    monkeypatch.setenv("STEP_WIDTH", "64")
    path = write(tmp_path, "read_once", FROM_ENVIRONMENT)
    jobs = [config.load(path), config.load(path, ["compiler.optlevel=1"])]
    for job in jobs:
        plan(job)
        assert has_answer(job)
    monkeypatch.setenv("STEP_WIDTH", "96")
    for job in jobs:
        assert not has_answer(job)
        assert width(plan(job)) == 64, "as it was imported"
        assert not has_answer(job)


# Across processes


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, with one in it."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "lib_of_steps.py").write_text("")
    install(folder, "Lib.of_steps", "1.0", "lib_of_steps")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    return folder


def install(folder: Path, name: str, version: str, module: str) -> Path:
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "top_level.txt").write_text(f"{module}\n")
    return about


def command(job: Path) -> Any:
    """The answer of a process of its own."""
    words = [sys.executable, "-m", "shardwright", "plan", str(job), "--json"]
    done = subprocess.run(words, cwd=job.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def test_what_a_model_read_and_imported_is_in_the_key_of_a_command(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables it read and packages it imported, and no others."""
    folder = tmp_path / "job"
    folder.mkdir()
    setting = '\nos.environ["XLA_FLAGS"] = "--xla_dump_to=/nowhere"\nos.environ["OWN"] = "1"\n'
    reading = 'assert os.environ["OWN"]\nimport lib_of_steps\n'
    text = FROM_ENVIRONMENT.replace("import os\n", f"import os\n{setting}{reading}", 1)
    path = write(folder, "of_environment", text)
    job = config.load(path)
    assert width(command(path)) == 64
    assert has_answer(job)
    with monkeypatch.context() as patched:
        patched.setenv("UNRELATED", "1")
        install(packages, "unrelated", "3.1", "unrelated")
        assert has_answer(job)
    changes = {"STEP_WIDTH": "96", "JAX_DEFAULT_PRNG_IMPL": "rbg", "XLA_FLAGS": "--other"}
    for name, value in changes.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert not has_answer(job), name
    old = packages / "Lib.of_steps-1.0.dist-info"
    new = old.rename(packages / "Lib.of_steps-1.1.dist-info")
    assert not has_answer(job)
    new.rename(old)
    assert has_answer(job)


@pytest.mark.matrix
def test_another_environment_is_another_question_to_commands(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "in_commands", FROM_ENVIRONMENT)
    first = command(path)
    with monkeypatch.context() as patched:
        patched.setenv("STEP_WIDTH", "96")
        assert width(command(path)) == 96 != width(first)
    with monkeypatch.context() as patched:
        patched.setenv("JAX_DEFAULT_PRNG_IMPL", "rbg")
        other = command(path)
    assert not is_stored(other) and is_stored(command(path))
    assert other["timing"]["step_time_s"] != first["timing"]["step_time_s"]
