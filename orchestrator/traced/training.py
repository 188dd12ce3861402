"""A module, a batch and an optimizer of a script as a job: planned as it is, or run in values by
processes that are given the script's objects."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.distribution import axis_named
from shardwright.compiler.frontend.pytorch.training import Training, train_task
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.service import ray_pickle

if TYPE_CHECKING:
    from shardwright.orchestrator.api import Report

_ENTRY, _OBJECTS = "traced_training.py", "training.pickle"
_TEXT = """import torch
from pathlib import Path

from shardwright.orchestrator.traced.training import read_task


def make_task():
    return read_task(Path(__file__).parent)
"""


def plan(training: Training, mesh: Any, settings: Mapping[str, object]) -> Report:
    """Whether the step of a script fits and how fast it is. Raises as `api.plan`."""
    from shardwright.orchestrator import api

    return api.plan(train_task(training), **_with_mesh(mesh, settings))


def run(training: Training, mesh: Any, settings: Mapping[str, object]) -> Report:
    """The step of a script in values and in time. Raises as `api.run`; UsageError for objects that
    no other process can be given."""
    from shardwright.orchestrator import api
    from shardwright.orchestrator.config.layout import with_samples

    given = _with_mesh(mesh, settings)
    if not api.BATCH & given.keys():
        job = with_samples(api.job(None, **given), train_task(training).samples)
        given["strategy__micro_batch"] = job.strategy.micro_batch
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        folder = Path(name)
        try:
            ray_pickle.write(folder / _OBJECTS, training)
        except Exception as error:
            raise UsageError(
                "SW_TORCH_SHARED",
                "a run requires objects that another process can be given, got"
                f" {type(error).__name__}: {error}",
                hint="put a function that makes the module in a file:"
                ' model__entry="module:function"',
            ) from error
        (folder / _ENTRY).write_text(_TEXT)
        entry = f"{folder / _ENTRY}:make_task"
        return api.run(api.job(None, model__entry=entry, **given))


def read_task(folder: Path) -> TrainTask:
    """The task of the objects that `run` left."""
    training: Training = ray_pickle.read(folder / _OBJECTS)
    return train_task(training)


def _with_mesh(mesh: Any, settings: Mapping[str, object]) -> dict[str, Any]:
    """The settings of a job, with the axes of a mesh: sizes by axis, or a DeviceMesh."""
    sizes = dict(mesh or {}) if mesh is None or isinstance(mesh, Mapping) else _of_device_mesh(mesh)
    return {**{f"mesh__{axis}": size for axis, size in sizes.items()}, **settings}


def _of_device_mesh(mesh: Any) -> dict[str, int]:
    """Sizes by axis of a DeviceMesh. Raises UsageError for a dim that is called after no axis."""
    names = tuple(mesh.mesh_dim_names or ())
    axes = [axis_named(name) for name in names]
    if not names or not all(axes) or len(set(axes)) < len(axes):
        raise UsageError(
            "SW_TORCH_MESH",
            "a DeviceMesh requires dims that are called after axes, each after another, got"
            f" {', '.join(names) or 'no names'}",
            hint="mesh_dim_names=('dp_shard', 'tp'), or mesh={'dp_shard': 8, 'tp': 4}",
        )
    return dict(zip(axes, map(int, mesh.shape), strict=True))
