"""Jobs: every key by file, --set and flag; everything else is a usage error that names the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.config.model import compute_type, resolve_task, source_files
from shardwright.orchestrator.road.capture import placed_task
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.units import unit_service

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


def test_file_then_flag_then_set_then_change(tmp_path: Path) -> None:
    path = write(tmp_path, JOB)
    job = config.load(path, ["run.steps=3", "strategy.micro-batch=4"], {"run.steps": 7})
    assert (job.model.preset, job.run.steps, job.strategy.micro_batch) == ("llama2-7b", 3, 4)
    job = config.load(path, ["run.steps=3"], {"run.steps": 7}, changes={"run.steps": 5})
    assert job.run.steps == 5
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


@pytest.mark.parametrize(
    ("short", "key"),
    [
        ("reduce_gradients=last", "strategy.reduce_gradients=last"),
        ("global-batch=64", "strategy.global_batch=64"),
        ("instances=2", "cluster.instances=2"),
        ("tp=4", "mesh.tp=4"),
    ],
)
def test_a_key_that_one_table_has_needs_no_table(short: str, key: str) -> None:
    assert config.load(None, [short]) == config.load(None, [key])


@pytest.mark.parametrize(
    ("text", "hint"), [("seed=3", "faults.seed or run.seed"), ("stepz=3", ""), ("remat", "")]
)
def test_a_key_of_two_tables_or_of_none_is_a_usage_error(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=r"--set requires table.key=value") as told:
        config.load(None, [text])
    assert hint in (told.value.diagnostic.hint or "")


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
        config.output_folder(config.JobConfig())
    config.with_absolute_paths(config.JobConfig())  # for those who write nothing there


def test_a_relative_event_log_lies_beside_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are relative to the working directory, not to the job file; in a Ray job neither is
    taken."""
    path = write(tmp_path, JOB)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    settings = ["output.events=log", "output.dir=out", "cache.dir=cache"]
    job = config.with_absolute_paths(config.load(path, settings))
    assert (job.output.events, job.output.dir) == (str(here / "log"), str(here / "out"))
    assert job.cache.dir == str(here / "cache")
    with unit_service(job, None):
        assert (here / "log").exists()


@pytest.mark.parametrize("in_ray_job", [False, True])
def test_the_home_directory_is_no_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_ray_job: bool
) -> None:
    """A folder `~` in the working directory of a Ray job would be lost with it."""
    monkeypatch.setenv("HOME", "/home/me")
    if in_ray_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    settings = ["output.events=~/log", "output.dir=~/out", "cache.dir=~/cache"]
    job = config.with_absolute_paths(config.load(write(tmp_path, JOB), settings))
    assert config.output_folder(job) == Path("/home/me/out")
    assert (job.output.events, job.cache.dir) == ("/home/me/log", "/home/me/cache")


@pytest.mark.parametrize(
    ("key", "flag"), [("output.events", "--events"), ("cache.dir", "--set cache.dir=")]
)
def test_what_outlives_a_ray_job_is_not_relative(
    key: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, JOB)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(UsageError, match=rf"SW_RELATIVE_OUTPUT.*{key} requires .* got x") as caught:
        config.with_absolute_paths(config.load(path, [f"{key}=x"]))
    assert flag in caught.value.diagnostic.hint
    for absolute in (str(tmp_path), "s3://bucket/cache", "~/cache", ""):
        config.with_absolute_paths(config.load(path, [f"{key}={absolute}"]))


def test_a_mesh_that_does_not_fill_the_cores_is_a_usage_error(tmp_path: Path) -> None:
    job = config.load(write(tmp_path, JOB), ["mesh.dp_shard=31"])
    with pytest.raises(UsageError, match=r"SW_MESH_PRODUCT.* 31 cores, target has 32"):
        layout_of(job)
    for target, hint in (
        ("trn1.32xlarge", "--instances 3 has 96 cores; or "),
        ("trn1.2xlarge", ""),
    ):
        wide = config.load(None, ["mesh.dp_shard=96", f"cluster.target={target}"])
        with pytest.raises(UsageError) as caught:
            layout_of(wide)
        assert caught.value.diagnostic.hint.startswith(f"{hint}choose sizes")


def test_a_mesh_is_chosen_only_where_no_number_of_shards_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "vocab_size": 2048, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    asked = [f"model.config={tmp_path}/config.json", "cluster.target=inf2.48xlarge"]
    layout, _ = placed_task(config.load(None, asked), Stages())
    assert layout.mesh.sizes == {"dp_replicate": 3, "dp_shard": 8}
    assert [finding.code for finding in layout.findings] == ["SW_MESH_CHOSEN"]
    left, _ = placed_task(config.load(None, [*asked, "mesh.dp_shard=auto"]), Stages())
    assert (left.mesh, left.findings) == (layout.mesh, layout.findings), "auto names no size"
    split, _ = placed_task(config.load(None, [*asked, "mesh.dp_shard=auto", "mesh.tp=2"]), Stages())
    assert split.mesh.sizes == {"dp_replicate": 3, "dp_shard": 4, "tp": 2}
    for other in ("mesh.dp_replicate=2", "mesh.cp=2"):
        own, _ = placed_task(config.load(None, [*asked, "mesh.dp_shard=auto", other]), Stages())
        assert own.mesh.sizes["dp_shard"] == 12 and not own.findings
    named, _ = placed_task(config.load(None, [*asked, "mesh.dp_shard=24"]), Stages())
    assert named.mesh.sizes == {"dp_shard": 24} and not named.findings
    assert (layout.captured_batch, layout.global_batch) == (named.captured_batch, 24)


def test_a_plan_of_a_missing_model_file_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path, JOB)
    assert main(["plan", str(job), "--set", "model.preset=", "--set", "model.config=no.json"]) == 2
    assert "SW_MODEL" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--set", "model.preset=", "--set", "model.config=bytes"]])
def test_a_file_that_is_no_text_is_a_usage_error(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bytes").write_bytes(b"\x80\x04")
    job = write(tmp_path, JOB) if words else Path("bytes")
    assert main(["plan", str(job), *words]) == 2
    assert "bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nseq_len = 1e309", "model.seq_len requires a whole number of tokens.*, got inf"),
        ("[model]\nseq_len = 1.5", "model.seq_len requires a whole number.*, got 1.5"),
        ("[model]\nlearning_rate = nan", "model.learning_rate requires float, got nan"),
        ("[mesh]\ntp = [8]", r"mesh.tp requires int, got \[8\]"),
        ("[mesh]\ntp = {auto = 1}", "mesh.tp requires int, got {'auto': 1}"),
        ("[cluster]\ninstances = 1000000", "cluster.instances requires 1 to 65536"),
        ("model = 3", r"\[model\] must be a table, got 3"),
        ("a = " + "[" * 50_000, "not valid TOML: lists or tables lie too deep"),
    ],
)
def test_values_of_no_kind_are_usage_errors(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        config.load(path, ("model.dtype=auto",))


def test_whole_numbers_may_be_written_with_a_point(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[model]\nseq_len = 1e3")
    assert config.load(tmp_path / "job.toml").model.seq_len == 1000


def test_a_config_is_a_path_or_its_text() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    sizes |= {"vocab_size": 512, "num_hidden_layers": 2}
    text = json.dumps({"torch_dtype": "float16", **sizes})
    job = config.load(None, [f"model.config={text}", "model.seq_len=16"])
    assert resolve_task(job).name == "model"
    assert compute_type(job) == "bfloat16" and not source_files(job)
    with pytest.raises(UsageError, match="its text is not JSON"):
        resolve_task(config.load(None, ["model.config={no"]))
    with pytest.raises(UsageError, match="config requires positive integers"):
        resolve_task(config.load(None, ["model.config={}"]))
