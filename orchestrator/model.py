"""The training task a job names: a preset, a Hugging Face `config.json`, or the user's own
function."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.diagnostics import UsageError
from orchestrator.config import JobConfig

if TYPE_CHECKING:
    from compiler.frontend.task import TrainTask

_DTYPES = {"float32": "f32", "bfloat16": "bf16"}


def resolve_task(job: JobConfig) -> TrainTask:
    """The task of `[model]`.

    Raises UsageError unless exactly one of preset, config, entry is given.
    """
    model = job.model
    given = [name for name in ("preset", "config", "entry") if getattr(model, name)]
    if len(given) != 1:
        raise UsageError(
            "SW_MODEL",
            f"[model] requires exactly one of preset, config, entry, got {given or 'none'}",
            None,
            "for example --model llama2-7b",
        )
    if model.entry:
        from compiler.frontend.task import load_task

        return load_task(model.entry, Path(job.base))
    if model.preset:
        from compiler.frontend.models.presets import preset_task

        return preset_task(model.preset, seq_len=model.seq_len, **_options(job))
    from compiler.frontend.models.llama import train_task

    config = read_config(model_path(job))
    seq_len = model.seq_len or config.get("max_position_embeddings", 0)
    return train_task(config, seq_len=seq_len, name=Path(job.base).name, **_options(job))


def compute_type(job: JobConfig) -> str:
    """The resolved `model.dtype`."""
    if job.model.dtype != "auto":
        return job.model.dtype
    return "bfloat16" if job.model.preset else "float32"


def _options(job: JobConfig) -> dict[str, Any]:
    model = job.model
    return {
        "dtype": _DTYPES[compute_type(job)],
        "optimizer": model.optimizer,
        "clip": model.clip,
        "lr": model.learning_rate,
        "remat": job.strategy.remat,
    }


def model_path(job: JobConfig) -> Path:
    """The file of `model.config`, relative to the job."""
    return Path(job.base) / job.model.config


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`.

    Raises UsageError when it cannot be read.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            "SW_MODEL", f"model.config: cannot read {path}: {error.strerror}"
        ) from error
    except json.JSONDecodeError as error:
        raise UsageError("SW_MODEL", f"model.config: {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError("SW_MODEL", f"model.config: {path} requires a JSON object")
    return data


def source_files(job: JobConfig) -> Iterable[Path]:
    """The user's files that the captured graph depends on, for the plan key.

    A config is one file; an entry may import anything beside it, so every Python file of the job's
    folder counts.
    """
    if job.model.config:
        return [model_path(job)]
    if job.model.entry:
        return sorted(Path(job.base).rglob("*.py"))
    return []
