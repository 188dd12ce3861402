"""Jobs: every key by file, --set and flag; everything else is a usage error that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.diagnostics import UsageError
from orchestrator import config
from orchestrator.build import layout_of
from orchestrator.job import unit_service

JOB = """
[model]
preset = "llama2-7b"
[strategy]
micro_batch = 2
global_batch = 128
[mesh]
dp_shard = "auto"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_file_then_set_then_flag(tmp_path: Path) -> None:
    path = write(tmp_path, JOB)
    job = config.load(path, ["run.steps=3", "strategy.micro-batch=4"], {"run.steps": 7})
    assert (job.model.preset, job.run.steps, job.strategy.micro_batch) == ("llama2-7b", 7, 4)
    assert job.mesh.dp_shard == config.AUTO
    assert job.base == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[modle]\n", "modle"),
        ("[model]\nlayers = 3\n", "model.layers"),
        ("[run]\nsteps = 'many'\n", "run.steps"),
        ("[cluster]\nprofile = 'fast'\n", "conservative, nominal, peak"),
        ("[model\n", "not valid TOML"),
        ("model = 3\n", "must be a table"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.load(write(tmp_path, text))
    assert named in str(caught.value)
    assert caught.value.exit_code == 2


def test_micro_batches_follow_from_batch_and_mesh(tmp_path: Path) -> None:
    layout = layout_of(config.load(write(tmp_path, JOB)))
    assert layout.mesh.sizes == {"dp_shard": 32}
    assert (layout.captured_batch, layout.num_microbatches) == (64, 2)


def test_a_batch_that_does_not_divide_names_the_key_and_a_value_that_does(tmp_path: Path) -> None:
    job = config.load(write(tmp_path, JOB), ["strategy.global_batch=100"])
    with pytest.raises(UsageError, match=r"global_batch requires a multiple of .* = 64, got 100"):
        layout_of(job)


def test_an_lnc_the_target_refuses_has_the_compilers_code(tmp_path: Path) -> None:
    job = config.load(write(tmp_path, JOB), ["cluster.lnc=2"])
    with pytest.raises(UsageError, match="NCC_EARG001"):
        layout_of(job)


def test_a_relative_output_is_refused_inside_a_ray_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(UsageError, match="absolute path"):
        config.with_absolute_output(config.JobConfig())


def test_a_relative_event_log_lies_beside_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are relative to the working directory, not to the job file; in a Ray job neither is
    taken."""
    path = write(tmp_path, JOB)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    settings = ["output.events=log", "output.dir=out", f"cache.dir={tmp_path}"]
    job = config.with_absolute_output(config.load(path, settings))
    assert (job.output.events, job.output.dir) == (str(here / "log"), str(here / "out"))
    with unit_service(job, None):
        assert (here / "log").exists()
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    for key, flag in (("events", "--events"), ("dir", "--out")):
        given = [f"output.dir={here}", f"output.events={here}", f"output.{key}=x"]
        with pytest.raises(UsageError, match=rf"output.{key} requires .* got x.*") as caught:
            config.with_absolute_output(config.load(path, given))
        assert f"pass {flag} /absolute/path" in str(caught.value.diagnostic.hint)
    assert config.with_absolute_output(config.load(path, given[:1])).output.events == ""


def test_a_mesh_that_does_not_fill_the_cores_is_a_usage_error(tmp_path: Path) -> None:
    job = config.load(write(tmp_path, JOB), ["mesh.dp_shard=31"])
    with pytest.raises(UsageError, match=r"SW_MESH_PRODUCT.* 31 cores, target has 32"):
        layout_of(job)
