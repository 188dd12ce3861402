"""The `config.json` that a job names or holds, and what layouts read of a model's sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.tensorflow.start import split_name
from shardwright.compiler.support.documents import parse_json, read_text
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model_keys import ModelConfig
from shardwright.orchestrator.models.presets import preset_config


def is_text(config: str) -> bool:
    """Whether `model.config` is what a `config.json` holds, not where one is."""
    return config.lstrip().startswith("{")


def model_config(job: JobConfig) -> dict[str, Any]:
    """What the `config.json` of a job holds. Raises UsageError when it cannot be read."""
    given = job.model.config
    if not is_text(given):
        return read_config(model_path(job))
    try:
        found: dict[str, Any] = parse_json(given)
    except ValueError as error:
        raise UsageError("SW_MODEL", f"model.config: its text is not JSON: {error}") from error
    return found


FILES = ("config", "hlo", "onnx", "mxnet", "tensorflow")
"""Keys of `[model]` whose value is a path; of `config` it may also be a text."""


def given_file(model: ModelConfig) -> tuple[str, str]:
    """(key, value) of the file that a model is, both empty where it is none."""
    return next(((key, getattr(model, key)) for key in FILES if getattr(model, key)), ("", ""))


def model_path(job: JobConfig) -> Path:
    """The file or folder that `[model]` names, relative to the job."""
    key, given = given_file(job.model)
    return Path(job.base) / (split_name(given)[0] if key == "tensorflow" else given)


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`. Raises UsageError when it cannot be read."""
    try:
        data = parse_json(read_text(path))
    except OSError as error:
        raise UsageError(
            "SW_MODEL", f"model.config: cannot read {path}: {error.strerror or error}"
        ) from error
    except ValueError as error:  # of JSON, or no text at all
        raise UsageError("SW_MODEL", f"model.config: {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError("SW_MODEL", f"model.config: {path} requires a JSON object")
    return data


def heads_of(job: JobConfig) -> int:
    """Query heads of a layer, which tensor parallelism shares out; 1 of what is no preset and no
    config, or does not say."""
    if job.model.preset:
        found = preset_config(job.model.preset)
    elif job.model.config:
        found = model_config(job)
    else:
        return 1
    counts = (found.get(key) for key in ("num_attention_heads", "n_head", "heads"))
    return next((n for n in counts if type(n) is int and n > 0), 1)
