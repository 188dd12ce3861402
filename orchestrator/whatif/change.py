"""A job with something changed, in the words of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from orchestrator.config import JobConfig, MeshConfig
from sharding.settings import AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What is changed, as `--set` takes it, and the job with it."""

    text: str
    job: JobConfig


def changed(job: JobConfig, keys: Mapping[str, Any]) -> Change:
    """The job with other values of some `table.key`s; a mesh is given whole, and the axes it does
    not name are left out, and so is a batch in tokens beside one in samples."""
    if "strategy.global_batch" in keys and job.strategy.global_batch_tokens:
        keys = {**keys, "strategy.global_batch_tokens": 0}
    tables: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    values: dict[str, Any] = {}
    for table, found in tables.items():
        kept = MeshConfig() if table == "mesh" else getattr(job, table)
        values[table] = dataclasses.replace(kept, **found)
    text = " ".join(f"{key}={_shown(value)}" for key, value in keys.items())
    return Change(text, dataclasses.replace(job, **values))


def _shown(value: Any) -> str:
    if value == AUTO and not isinstance(value, bool):
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)
