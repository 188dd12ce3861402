"""The words of the command: names that are nearly right, values that help lists, a job without a
file, and a mesh that is given whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import UsageError, did_you_mean, nearest
from shardwright.compiler.machine.target import target_names
from shardwright.compiler.options import CompileOptions
from shardwright.orchestrator import cli
from shardwright.orchestrator.config import config, model_keys
from shardwright.orchestrator.config.job_flags import as_words, job_config
from shardwright.orchestrator.models.presets import preset_list
from shardwright.sharding.settings import STRATEGIES, StrategySettings
from shardwright.sim_cluster.profiles import NAMES as PROFILES

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("orchestrator", "sharding", "sim_cluster", "compiler", "collectives")


@pytest.mark.parametrize(
    ("word", "known", "most", "found"),
    [
        ("dp_sharded", ("pp", "dp_replicate", "dp_shard"), 3, ["dp_shard"]),
        ("LLM_Training", ("fsdp", "llm-training"), 1, ["llm-training"]),
        ("trn1n", ("trn1.32xlarge", "trn1n.32xlarge"), 1, ["trn1n.32xlarge"]),
        ("llama2", ("llama2-7b", "llama2-13b", "bert-base"), 3, ["llama2-7b", "llama2-13b"]),
        ("--mseh", ("--mesh", "--set", "--seed"), 3, ["--mesh"]),
        ("tp", ("pp", "dp"), 1, []),
        ("frobnicate", ("fold", "cse"), 3, []),
        ("bert-bse", ("bert-base", "bert-large", "vit-base"), 3, ["bert-base"]),
    ],
)
def test_nearest_names(word: str, known: tuple[str, ...], most: int, found: list[str]) -> None:
    assert nearest(word, known, most) == found


def test_what_is_like_nothing_gets_the_other_hint() -> None:
    assert did_you_mean("frobnicate", ("fold",), "list them") == "list them"
    assert did_you_mean("fodl", ("fold", "cse")) == "did you mean fold?"


def test_names_are_compared_in_one_place() -> None:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    own = [path.parent.name for path in files if "get_close_matches" in path.read_text()]
    assert own == ["diagnostics"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("plan --model bert-base --mesh dp_sharded=4", "did you mean dp_shard?"),
        ("plan --model bert-base --set model.remat=none", "did you mean strategy.remat?"),
        ("plan --model bert-base --set modl.dtype=auto", "did you mean model?"),
        ("plan --model bert-base --set run.stepz=4", "did you mean steps?"),
        ("plan --model bert-base --strategy fsdq", "did you mean fsdp?"),
        ("plan --model bert-base --instances trn1n.32xlarge", "is a value of cluster.target"),
        ("plan --model bert-base --placement toros", "did you mean torus?"),
        ("plan --model bert-base --placement dp_shrad", "did you mean dp_shard?"),
        ("plan --model bert-base --target trn1n.32xlarg", "did you mean trn1n.32xlarge or"),
        ("plan --model bert-base --explain tiem", "did you mean time?"),
        (
            "plan --model bert-base --set cluster.collectives=mesh_max=1",
            "did you mean mesh_max_bytes",
        ),
        ("plan --model bert-bsae", "did you mean bert-base?"),
        ("plan --mseh dp_shard=4", "did you mean --mesh?"),
        ("plan --fault slow_core=1:2", "did you mean slow_cores?"),
        ("paln", "did you mean plan?"),
        ("neff dmup", "did you mean dump?"),
        ("scale --mode weka", "did you mean weak?"),
        ("sweep --model bert-base --vary rmat=full", "did you mean remat?"),
        ("nccom allrr -r 2", "did you mean allr?"),
        ("nccom allr -r 2 -d fp23", "did you mean fp32?"),
        ("nccom allr -r 2 --set rdh_max_byte=1", "did you mean rdh_max_bytes?"),
        ("opt - --pass flod", "did you mean fold?"),
        ("errors SW_MESHAXIS", "did you mean SW_MESH_AXIS?"),
        ("run", "for example --model llama2-7b"),
    ],
)
def test_names_that_are_nearly_right(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    assert hint in capsys.readouterr().err


def test_a_word_that_is_not_understood_is_json_for_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "--json", "--mseh=tp=8"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["hint"]) == ("SW_USAGE", "did you mean --mesh?")
    assert error["message"] == "shardwright plan: unrecognized arguments: --mseh=tp=8"


def test_help_lists_the_values_of_choices(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag of a key that has names for its values lists them, from where they are defined."""
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    assert preset_list().replace(" ", "") in shown.replace(" ", "")
    for names in (STRATEGIES, target_names(), PROFILES):
        assert all(name in shown for name in names)
    remat, dtype = (
        kind.__dataclass_fields__[key].metadata["choices"]
        for kind, key in ((StrategySettings, "remat"), (model_keys.ModelConfig, "dtype"))
    )
    for key in ("run.executor", "run.progress", "cluster.placement", "cluster.lnc"):
        assert f"[{', '.join(config.words_of(key))}]" in shown
    assert f"[{', '.join(remat)}] (default full)" in shown
    assert f"[{', '.join(dtype)}] (default auto)" in shown
    axes = ", ".join(axis.name for axis in dataclasses.fields(config.MeshConfig))
    assert f"Axes: {axes}" in shown


def test_the_strategies_of_the_settings_are_those_of_the_registry() -> None:
    assert set(config.words_of("strategy.name")) == set(STRATEGIES)
    assert set(config.words_of("cluster.profile")) == set(PROFILES)
    assert config.words_of("compiler.optlevel") == ("1", "2", "3")
    assert "compiler.lnc" not in config.KEYS and "lnc" in CompileOptions.__dataclass_fields__


@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_level_that_may_be_chosen_comes_back_from_its_short_form(level: int) -> None:
    """The usual one too, which is left out there."""
    options = config.load(None, [f"compiler.optlevel={level}"]).compiler
    assert CompileOptions.unpacked(options.packed()).optlevel == level
    assert (options.packed() == CompileOptions().packed()) == (level == 2)


JOB = '[model]\npreset = "bert-base"\n[mesh]\ndp_shard = 32\n'


@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        ([], {"dp_shard": 32}),
        (["--mesh", "dp_replicate=32"], {"dp_replicate": 32}),
        (["--mesh", ""], {}),
        (["--set", "mesh.tp=2"], {"dp_shard": 32, "tp": 2}),
        (["--set", "mesh.tp=2", "--mesh", "dp_shard=auto"], {"dp_shard": -1, "tp": 2}),
        (["--set", "mesh.tp=2", "--mesh", "tp=4"], {"tp": 2}),
    ],
)
def test_a_mesh_takes_the_place_of_the_files(
    words: list[str], mesh: dict[str, int], tmp_path: Path
) -> None:
    """Also where the job is read again from the words that are sent to a cluster."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    args = cli._parser().parse_args(["run", str(path), *words])
    args.job = path
    sent = cli._parser().parse_args(["run", str(path), *as_words(args, tmp_path)])
    sent.job = path
    for asked in (args, sent):
        sizes = dataclasses.asdict(job_config(asked).mesh)
        assert {axis: size for axis, size in sizes.items() if size} == mesh


def test_run_takes_what_plan_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "bert-base", "--mesh", "dp_shard=4", "--steps", "2"]
    run, plan = (cli._parser().parse_args([verb, *words]) for verb in ("run", "plan"))
    run.job = None
    assert run.jobs == [] and job_config(run) == job_config(plan)


def test_a_mistake_is_raised_and_no_exit() -> None:
    with pytest.raises(UsageError, match="--tries: expected one argument"):
        cli._parser().parse_args(["plan", "--tries"])
