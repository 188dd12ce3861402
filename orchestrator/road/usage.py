"""What `run` refuses as usage before any model is captured: seconds before, or, on a cluster, a
queue and an upload before.

Nothing of the user's is imported here, and nothing heavy is loaded: of a model it is seen that it
is named, and of a file that it is there.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import Mode
from shardwright.orchestrator.config.config import JobConfig, RunConfig
from shardwright.orchestrator.config.layout import layout_of, machine_of
from shardwright.orchestrator.config.model import check_named
from shardwright.orchestrator.config.model_file import (
    is_text,
    model_config,
    model_path,
    read_config,
)
from shardwright.orchestrator.models.presets import preset_config
from shardwright.orchestrator.models.text import check_data
from shardwright.sharding.settings import MANUAL


def check_usage(job: JobConfig, has_values: bool = True, copied: Path | None = None) -> None:
    """Refuse a job as `run` would; without `has_values` as `run --compile-only` would. `copied` is
    the folder of a job that will run on another host, in a copy of it: a file with an absolute path
    that is not here may be there. Raises the UsageError of `run`."""
    check_executor(job.run)
    check_named(job)
    _check_model(job, is_here=copied is None)
    if job.strategy.name != MANUAL:  # whose mesh is the step's
        layout_of(job)
    if has_values:
        _check_values(job, copied)


def _check_model(job: JobConfig, is_here: bool) -> None:
    model = job.model
    if model.preset:
        preset_config(model.preset)
    if is_text(model.config):
        model_config(job)
        return
    given = model.config or model.hlo or model.graph
    path = model_path(job) if given else None
    if path is None or (not is_here and _may_be_there(given)):
        return
    if model.config:
        read_config(path)
    elif not path.is_file():
        missing = os.strerror(errno.ENOENT)
        key = next(key for key in ("hlo", "onnx", "mxnet") if getattr(model, key))
        raise UsageError("SW_MODEL", f"model.{key}: cannot read {path}: {missing}")


def _may_be_there(path: str) -> bool:
    return os.path.isabs(path) and not os.path.exists(path)


def _check_values(job: JobConfig, copied: Path | None) -> None:
    """What a value run asks for besides."""
    run = job.run
    check_steps(run.steps)
    check_hosts(run.hosts, machine_of(job).cores * job.cluster.instances)
    is_text = bool(job.model.preset or job.model.config)  # others read what they like there
    if is_text and (copied is None or not _may_be_there(run.data)):
        check_data(run.data, copied or Path())


def check_executor(run: RunConfig) -> None:
    """That a time limit can be kept. Raises UsageError."""
    if run.executor == "inline" and run.unit_timeout_s:
        raise UsageError(
            "SW_USAGE",
            "run.unit_timeout_s requires workers that can be ended, got run.executor = inline",
            hint="take --executor process",
        )


def check_steps(steps: int) -> None:
    """At least one. Raises UsageError."""
    if steps < 1:
        raise UsageError("SW_STEPS", f"run.steps requires at least 1, got {steps}")


def check_room(steps: int, context: int, mode: Mode) -> None:
    """Decode steps fill the half of a context that their prompts leave. Raises UsageError."""
    room = context - max(1, context // 2)
    if mode is Mode.DECODE and steps > room:
        raise UsageError(
            "SW_STEPS",
            f"run.steps requires at most {room}, what prompts of half the context of {context}"
            f" tokens leave, got {steps}",
            hint=f"set --seq-len to {2 * steps} or more, or fewer steps",
        )


def check_hosts(hosts: int, ranks: int) -> None:
    """As many hosts of ranks as there can be. Raises UsageError."""
    if not 0 <= hosts <= ranks:
        raise UsageError(
            "SW_USAGE",
            f"run.hosts requires at most one host per rank ({ranks}), got {hosts}",
        )
