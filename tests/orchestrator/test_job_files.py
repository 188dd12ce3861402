"""Job files are data: `[model] entry` is the only key that runs code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shlex
import typing
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import ImportRuleError, ShardingError, UsageError
from shardwright.compiler.frontend.reference import task_batches
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config, model_keys
from shardwright.orchestrator.config.config import TABLES
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.road.units import executor_of
from shardwright.orchestrator.submission import submit
from tests.support.small_job import JOB, SIZES

EVIL = (
    'import pathlib\n\npathlib.Path(__file__).with_name("ran").touch()\n\n\ndef main():\n    pass\n'
)
TEXT_KEYS = [
    f"{table}.{field.name}"
    for table, kind in TABLES.items()
    for field in dataclasses.fields(kind)
    if typing.get_type_hints(kind)[field.name] is str and "key" not in field.metadata
]
HARMLESS = [key for key in TEXT_KEYS if key != "model.entry"]


class Pickled:
    """Leaves the mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "evil.npz").write_bytes(pickle.dumps(Pickled(tmp_path / "ran")))
    return tmp_path


def test_there_are_keys_to_try() -> None:
    assert {"model.entry", "model.config", "run.data", "cluster.target"} <= set(TEXT_KEYS)
    assert len(TEXT_KEYS) > 15


def test_the_mark_is_left_by_entry(folder: Path) -> None:
    words = ["--set", "model.config=", "--set", "model.entry=evil:main"]
    assert main(["plan", "job.toml", *words]) == 2  # no TrainTask; but it has run
    assert (folder / "ran").exists()


def read(settings: list[str]) -> config.JobConfig | None:
    """The job as far as its texts are looked at: machine, mesh, faults, executor, model."""
    try:
        job = config.with_absolute_paths(config.load(Path("job.toml"), settings))
        layout_of(job)
        executor_of(job)
        resolve_task(job)
    except (ImportRuleError, UsageError, ShardingError):
        return None
    return job


def test_no_other_key_runs_code(folder: Path) -> None:
    """Each key alone, then bundles and batches of a job with all those that are taken as they
    are."""
    taken = []
    for key in HARMLESS:
        for value in ("evil:main", "evil.npz", "evil.py"):
            read(["model.config=", f"{key}={value}"])
            if read([f"{key}={value}"]) and value == "evil.py":
                taken.append(key)
    assert {"run.data", "cache.dir", "output.dir", "output.events"} <= set(taken)
    values = {key: "evil.py" if key == "run.data" else f"{key}.py" for key in taken}
    words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    assert main(["run", "job.toml", "--compile-only", *words]) == 0
    task = resolve_task(config.load(Path("job.toml")))
    for data in ("evil.py", "evil.npz"):
        with contextlib.suppress(UsageError):
            next(task_batches(task, 0, 2, data))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["a; touch ran", "$(touch ran)", "`touch ran`", "a b'c"])
def test_the_command_of_a_submitted_job_is_quoted(name: str, folder: Path) -> None:
    file = folder / f"{name}.toml"
    model = model_keys.ModelConfig(preset="llama2-7b")
    asked = submit.Asked(
        jobs={file: config.JobConfig(model=model, output=config.OutputConfig(dir="/out"))},
        words=["--set", f"output.dir=/out/{name}"],
        address="",
        working_dir=folder,
        environment={},
    )
    command = submit.submission(asked).command
    assert shlex.split(command)[4:] == [file.name, "--set", f"output.dir=/out/{name}"]
