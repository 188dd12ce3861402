"""Shard, compile and simulate Trainium training steps without the hardware: the public names.

    from shardwright import TrainTask, plan

What a name needs is loaded with its first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.compiler.frontend.task import TrainTask
    from shardwright.orchestrator.api import (
        Job,
        Report,
        capture,
        compile_graphs,
        compile_only,
        job,
        plan,
        run,
        train_step,
    )
    from shardwright.orchestrator.config.config import JobConfig

_API = "shardwright.orchestrator.api"

__all__ = [
    "Job",
    "JobConfig",
    "Report",
    "TrainTask",
    "capture",
    "compile_graphs",
    "compile_only",
    "job",
    "plan",
    "run",
    "train_step",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_API), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
