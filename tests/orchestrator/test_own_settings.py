"""What a job says about how its step is built: given to the user's function, or refused with the
reason; and the ways to name a model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import ShardingError, UsageError
from shardwright.compiler.frontend.capture import capture
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.job_flags import changed_keys
from shardwright.orchestrator.config.model import model_key, resolve_task, source_files
from shardwright.orchestrator.models.presets import preset_task
from shardwright.orchestrator.road.plan_cache import plan_key
from shardwright.sharding.prepare.precision import rounded_graph
from shardwright.sharding.settings import StrategySettings
from tests.models import prime_model
from tests.support.road import captured_graph

MODEL = """
from tests.models import prime_model

TOLD = {}

def plain():
    return prime_model.train_task()

def told(seq_len=8, remat="none", dtype=None, optimizer=None):
    TOLD.update(seq_len=seq_len, remat=remat, dtype=dtype, optimizer=optimizer)
    return prime_model.train_task()

def any_of_them(**settings):
    TOLD.clear()
    TOLD.update(settings)
    return prime_model.train_task()
"""
SAID = {
    "model.seq_len=4096": "seq_len",
    "model.dtype=bfloat16": "dtype",
    "model.optimizer=sgd": "optimizer",
    "model.learning_rate=0.5": "learning_rate",
    "model.clip=0": "clip",
    "strategy.remat=none": "remat",
    "strategy.remat=full": "remat",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_settings_model.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text('[model]\nentry = "own_settings_model:plain"\n')
    return tmp_path


def job(folder: Path, function: str, *said: str) -> config.JobConfig:
    return config.load(folder / "job.toml", [f"model.entry=own_settings_model:{function}", *said])


@pytest.mark.parametrize("said", SAID)
def test_what_a_function_does_not_take_is_refused(folder: Path, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_task(job(folder, "plain", said))
    found = caught.value.diagnostic
    assert found.code == "SW_MODEL_SETTING" and str(found.loc) == "own_settings_model.py:6"
    assert f"requires a function that takes {SAID[said]}, got plain()" in found.message
    assert f"def plain({SAID[said]}=...)" in found.hint


def test_what_a_function_takes_is_given(folder: Path) -> None:
    import importlib

    said = ("model.seq_len=4096", "strategy.remat=full", "model.dtype=bfloat16")
    resolve_task(job(folder, "told", *said))
    told: dict[str, Any] = importlib.import_module("own_settings_model").TOLD
    assert told == {"seq_len": 4096, "remat": "full", "dtype": "bfloat16", "optimizer": None}
    resolve_task(job(folder, "told"))
    assert told == {"seq_len": 8, "remat": "none", "dtype": None, "optimizer": None}
    resolve_task(job(folder, "any_of_them", *said))
    assert told == {"seq_len": 4096, "remat": "full", "dtype": "bfloat16"}


def test_saying_the_usual_is_another_question(folder: Path) -> None:
    silent, told = job(folder, "told"), job(folder, "told", "strategy.remat=full")
    assert plan_key(silent) != plan_key(told) and model_key(silent) != model_key(told)
    assert silent.as_dict() == told.as_dict()


def test_a_lowered_step_is_as_it_was_lowered(tmp_path: Path) -> None:
    (tmp_path / "step.mlir").write_text("module {}")
    asked = config.load(None, [f"model.hlo={tmp_path}/step.mlir", "model.dtype=bfloat16"])
    with pytest.raises(UsageError, match="which is lowered") as caught:
        resolve_task(asked)
    assert caught.value.code == "SW_MODEL_SETTING"


def test_a_file_of_python_is_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "my-step.py").write_text("import beside\n" + MODEL)
    (folder / "inner" / "beside.py").write_text("")
    in_file = job(folder, "plain", "model.entry=inner/my-step.py:plain")
    assert resolve_task(in_file).name == prime_model.train_task().name
    assert [path.name for path in source_files(in_file)] == ["my-step.py"]
    monkeypatch.chdir(folder / "inner")
    asked = changed_keys("model", "my-step.py:plain")["model.entry"]
    assert asked == f"{folder.resolve()}/inner/my-step.py:plain"
    with pytest.raises(UsageError, match="there is none") as caught:
        resolve_task(job(folder, "plain", "model.entry=absent.py:plain"))
    assert caught.value.code == "SW_ENTRY"


def test_a_folder_with_a_config_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "llama2-7b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({}))
    where = str(tmp_path.resolve() / "{}" / "config.json")
    for text in ("mine", "./mine", "./mine/"):
        assert changed_keys("model", text)["model.config"] == where.format("mine")
    assert changed_keys("model", "./llama2-7b")["model.config"] == where.format("llama2-7b")
    assert changed_keys("model", "llama2-7b")["model.preset"] == "llama2-7b"
    assert changed_keys("model", "../absent/")["model.preset"] == "../absent/"


@pytest.mark.parametrize(
    ("preset", "published"), [("llama2-7b", 4096), ("gpt3-125m", 2048), ("bert-base", 512)]
)
def test_presets_take_longer_sequences(preset: str, published: int) -> None:
    task = preset_task(preset, seq_len=2 * published)
    assert task.tokens_per_sample == 2 * published
    assert task.batch(1)["tokens"].shape == (1, 2 * published)
    assert preset_task(preset).tokens_per_sample == published


def test_learned_positions_are_as_many_as_tokens() -> None:
    found = {
        info.name: info.shape for info in capture(preset_task("gpt3-125m", seq_len=4096), 1).inputs
    }
    assert found["params/positions"] == (4096, 768)
    with pytest.raises(UsageError, match="197 positions"):
        preset_task("vit-base", seq_len=198)


@pytest.mark.parametrize("key", ["output_dtype", "param_dtype"])
def test_a_type_that_would_round_nothing_is_refused(key: str) -> None:
    graph, inputs, _ = captured_graph(prime_model.train_task(num_blocks=1), 2)
    settings = StrategySettings(**{key: "bfloat16"})
    if key == "param_dtype":
        inputs = tuple(replace(s, role="optimizer") if s.role == "parameter" else s for s in inputs)
    with pytest.raises(ShardingError, match=f"strategy.{key} requires a step with") as caught:
        rounded_graph(graph, inputs, settings)
    assert caught.value.code == "SW_PRECISION_UNUSED"
