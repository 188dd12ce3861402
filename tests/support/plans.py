"""Reports of `plan` for small jobs, made in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.orchestrator.config import config
from shardwright.orchestrator.road.plan_cache import plan
from tests.support.small_job import SIZES, write_job


def report_of(
    folder: Path, layers: int = 1, sets: tuple[str, ...] = (), **tables: Mapping[str, object]
) -> dict[str, Any]:
    """The plan of the small llama with some settings, on units that run here."""
    return plan(job_of(folder, layers, sets, **tables))


def job_of(
    folder: Path, layers: int = 1, sets: tuple[str, ...] = (), **tables: Mapping[str, object]
) -> config.JobConfig:
    """The job of the small llama with some settings."""
    path = write_job(folder, **tables)
    sizes = SIZES | {"num_hidden_layers": layers, "max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps(sizes))
    return config.load(path, ("run.executor=inline", *sets))
