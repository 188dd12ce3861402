"""NEURON_CC_FLAGS: the same table as the command's flags, below everything the user says nearer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.surface.flags import FLAGS, Effect, Flag, Kind
from shardwright.orchestrator import cli
from shardwright.orchestrator.compile.cc_flags import job_tables
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.job_flags import job_config
from tests.support.model_files import compile_line, meta_of, write_model

VARIABLE = "NEURON_CC_FLAGS"


def job(*words: str) -> JobConfig:
    """The job the command resolves from these words."""
    parser = cli._parser()
    return job_config(parser.parse_args(["plan", *words]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m.hlo.pb", lambda x: x * 2, [np.zeros((4, 6), np.float32)])
    return tmp_path


def test_the_command_takes_flags_of_the_environment_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "--target=trn2 --lnc 1 --model-type transformer -O1 --no_cache")
    assert compile_line("shardwright compile m.hlo.pb -O3") == 0
    meta = meta_of(folder / "file.neff")
    assert meta["options"]["model_type"] == "transformer" and meta["options"]["optlevel"] == 3
    assert compile_line("shardwright compile m.hlo.pb --target trn1 --lnc 1") == 0
    monkeypatch.setenv(VARIABLE, "--frobnicate")
    capsys.readouterr()
    assert compile_line("shardwright compile m.hlo.pb --target trn1") == 2
    assert f"{VARIABLE}: unrecognized arguments: --frobnicate" in capsys.readouterr().err


def test_the_machine_of_the_platform_is_below_all_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen3")
    assert job().cluster.target == "trn2.48xlarge"
    assert job("--target", "inf2").cluster.target == "inf2.48xlarge"
    monkeypatch.setenv(VARIABLE, "--target trn1")
    assert job().cluster.target == "trn1.32xlarge"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen9")
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(UsageError, match="gen9"):
        job()


def test_a_job_takes_them_below_its_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "--target trn1 --auto_cast=matmult --auto-cast-type FP16 --enable-experimental-O1"
        " --cache_dir=/tmp/units --distribution-strategy FSDP --retry_failed_compilation"
    )
    monkeypatch.setenv(VARIABLE, text)
    found = job()
    assert (found.cluster.target, found.strategy.name) == ("trn1.32xlarge", "fsdp")
    assert (found.compiler.auto_cast, found.compiler.auto_cast_type) == ("matmult", "fp16")
    assert found.compiler.optlevel == 1
    assert "--enable-experimental-o1 is deprecated" in capsys.readouterr().err
    path = tmp_path / "job.toml"
    path.write_text('[compiler]\nauto_cast = "all"\n[cluster]\ntarget = "trn1n.32xlarge"\n')
    nearer = job(str(path), "--set", "compiler.optlevel=3")
    assert (nearer.compiler.auto_cast, nearer.compiler.auto_cast_type) == ("all", "fp16")
    assert nearer.compiler.optlevel == 3 and nearer.cluster.target == "trn1n.32xlarge"


def test_a_release_changes_the_defaults_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "--compiler-version-profile 2.13.68")
    assert job().compiler.auto_cast == "matmult"
    monkeypatch.delenv(VARIABLE)
    assert job().compiler.auto_cast == "none"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--auto-cast some", "requires one of none, matmult, all"),
        ("--optlevel", "expected one argument"),
        ("model.hlo.pb", "unrecognized arguments"),
        ("--output 'x", "closed quotes"),
        ("--target gpu", "trn1"),
        ("--logical-nc-config 2", "cluster.lnc"),
        ("--distribution-strategy zero", "requires one of generic, llm-training, fsdp"),
    ],
)
def test_mistakes_are_usage_errors(
    text: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert cli.main(["plan", "--model", "llama2-7b"]) == 2
    assert named in capsys.readouterr().err


OPTIONS = [flag for flag in FLAGS if flag.effect is Effect.OPTION]


@pytest.mark.parametrize("flag", OPTIONS, ids=lambda flag: flag.name)
def test_every_option_of_the_table_reaches_a_job(flag: Flag) -> None:
    default = getattr(DEFAULTS, flag.field)
    others = ["7", *(value for value in flag.values if value != str(default))]
    text = f"--{flag.name}" + ("" if flag.kind is Kind.SWITCH else f"={others[-1]}")
    changes = flag.kind is not Kind.SWITCH or flag.constant != default
    field = next(f for f in dataclasses.fields(CompileOptions) if f.name == flag.field)
    table = field.metadata.get("key", "compiler").partition(".")[0]
    assert set(job_tables({VARIABLE: text}).tables.get(table, {})) == {flag.field} & {
        flag.field if changes else ""
    }


def test_no_variable_says_nothing() -> None:
    assert job_tables({}).tables == {"compiler": {}}
    with pytest.raises(UsageError, match=VARIABLE):
        job_tables({VARIABLE: "--verbose"})
