"""The task of a job, and where it lies on its cluster as far as the model has a say in that."""

from __future__ import annotations

from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.stablehlo import import_with_shardings
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.layout import (
    Layout,
    OwnMesh,
    layout_of,
    leaves_shards,
    machine_of,
    remeshed,
)
from shardwright.orchestrator.road.stages import Stages
from shardwright.sharding.partition.mesh import SHARD_AXIS
from shardwright.sharding.partition.partitioned import slots
from shardwright.sharding.settings import MANUAL
from shardwright.sharding.strategies.manual import data_ways, user_mesh
from shardwright.sharding.strategies.ranks import mesh_for_state


def placed_task(job: JobConfig, stages: Stages) -> tuple[Layout, TrainTask]:
    """The task of a job and where it lies. Raises UsageError, as `layout_of`."""
    is_own = job.strategy.name == MANUAL
    layout = None if is_own else layout_of(job)
    with stages.timed("capture"):
        task = stages.traces.task(job)
        own = _read_own_mesh(job, task) if is_own else None
    if layout is None or job.strategy.global_batch_tokens:
        layout = layout_of(job, own, task.tokens_per_sample)
    if is_own or not leaves_shards(job):
        return layout, task
    return _with_shared_state(job, layout, task, stages), task


def _read_own_mesh(job: JobConfig, task: TrainTask) -> OwnMesh:
    """What a first capture says, of one sample per core, so that every sharding divides it."""
    captured = capture(task, machine_of(job).cores * job.cluster.instances)
    graph, user = import_with_shardings(captured.artifact, base_dir=job.base)
    return OwnMesh(user_mesh(user), data_ways(graph, slots(captured.inputs), user))


def _with_shared_state(job: JobConfig, layout: Layout, task: TrainTask, stages: Stages) -> Layout:
    """The layout of a job that leaves the number of shards to us, with as many ranks sharing the
    state as its weights divide by; samples lie as before, so that the step is traced once."""
    if layout.mesh.sizes.get(SHARD_AXIS, 1) == 1 or not job.strategy.zero_stage:
        return layout
    traced = stages.trace(job, task, layout.captured_batch)
    mesh, notes = mesh_for_state(*traced.step.parts, layout.mesh, job.strategy)
    return layout if mesh == layout.mesh else remeshed(job, layout, mesh, notes)
