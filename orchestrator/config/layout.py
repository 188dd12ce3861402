"""How a job lies on its cluster: its mesh, its batch, and all else of the job file that is text.

Everything is parsed here, once: what follows reads a `Layout`. Nothing is captured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.collectives.ops import CollectiveError
from shardwright.collectives.placement import place_mesh
from shardwright.collectives.topology import Topology
from shardwright.compiler.diagnostics import Diagnostic, ShardingError, UsageError, did_you_mean
from shardwright.compiler.frontend.task import Mode
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import NEURONX_CC, Target, load_target, logical
from shardwright.orchestrator.config.collective_settings import job_settings
from shardwright.orchestrator.config.config import JobConfig, words_of
from shardwright.orchestrator.config.faults import faults_of
from shardwright.orchestrator.config.model_file import heads_of
from shardwright.orchestrator.config.packets import packets_of
from shardwright.sharding.partition.mesh import (
    DATA_AXES,
    SHARD_AXIS,
    Mesh,
    check_product,
    parse_mesh,
)
from shardwright.sharding.settings import AUTO, MANUAL, StrategySettings
from shardwright.sharding.strategies.registry import default_axes
from shardwright.sim_cluster.timing.contention import DEFAULT_PACKETS, Packets
from shardwright.sim_cluster.timing.faults import NO_FAULTS, Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A job's cluster and how the job lies on it: everything of `[cluster]`, `[mesh]`, `[faults]`
    and of batches that is text in the job file, read once."""

    target: Target
    topology: Topology  # of all instances
    mesh: Mesh
    captured_batch: int  # samples of one micro-batch over all data ranks
    global_batch: int
    num_microbatches: int
    packets: Packets = DEFAULT_PACKETS  # of DMA
    collectives: Mapping[str, Any] = field(default_factory=dict)  # fields of `CollectiveCosts`
    faults: Faults = NO_FAULTS
    findings: tuple[Diagnostic, ...] = ()  # about the mesh, where it was left to us


@dataclass(frozen=True, slots=True)
class OwnMesh:
    """The mesh a step names itself (strategy manual), and into how many parts it cuts samples."""

    mesh: Mesh
    data_ways: int


def layout_of(job: JobConfig, own: OwnMesh | None = None, tokens_per_sample: int = 0) -> Layout:
    """Mesh and batch of a job; `own` is the step's mesh, where the strategy takes that. A batch in
    tokens counts once it is known how many a sample has. A micro-batch that is to be chosen lies as
    one of 1 does. Raises UsageError and ShardingError for an unknown target, an lnc it refuses, a
    mesh that does not fill the cores or is not the step's, a placement that does not name its axes,
    a batch that does not divide, packet sizes that no runtime takes, unknown thresholds of
    collectives, or faults of what is not there."""
    packets = packets_of(job.strategy)
    collectives = job_settings(job.cluster.collectives)
    target = machine_of(job)
    topology = cluster_topology(target, job.cluster.instances)
    faults = faults_of(job.faults, topology)
    cores = target.cores * job.cluster.instances
    each = target.cores if target.efa_devices else 0  # else there is one instance
    try:
        if own:
            mesh = _own_mesh(job, own, cores, each)
        else:
            mesh = parse_mesh(
                _given_axes(job) or _usual_axes(job, cores, target.cores), cores, per_instance=each
            )
    except ShardingError as error:  # the mesh is what the user typed, not what a graph refused
        d = error.diagnostic
        raise UsageError(d.code, d.message, d.loc, d.hint) from error
    _check_placement(job, topology, mesh)
    ways = own.data_ways if own else mesh.size(DATA_AXES)
    captured = job.strategy.smallest_micro_batch * ways
    global_batch = asked_batch(job.strategy, ways, tokens_per_sample) or captured
    if job.model.mode != Mode.TRAIN:  # nothing is added up over parts of a batch
        captured = global_batch
    return Layout(
        target=target,
        topology=topology,
        mesh=mesh,
        captured_batch=captured,
        global_batch=global_batch,
        num_microbatches=global_batch // captured,
        packets=packets,
        collectives=collectives,
        faults=faults,
    )


def _usual_axes(job: JobConfig, cores: int, each: int) -> dict[str, int | str]:
    """The mesh of a job that names none: that of its strategy; of inference as many cores tensor
    parallel as share the cores of an instance (`each`) and the model's heads evenly, so that each
    reads its own part of the weights, and copies of those on the other `cores`."""
    if job.model.mode == Mode.TRAIN:
        return default_axes(job.strategy.name)
    ways = math.gcd(each, heads_of(job))
    return {"tp": ways} if ways == cores else {"dp_replicate": "auto", "tp": ways}


def asked_batch(strategy: StrategySettings, ways: int, tokens_per_sample: int) -> int:
    """The samples of a step as they are asked for; 0 where they are not, or not known yet. Raises
    UsageError."""
    samples, tokens = strategy.global_batch, strategy.global_batch_tokens
    if samples and tokens:
        raise UsageError(
            "SW_BATCH",
            "a batch requires samples or tokens, got strategy.global_batch"
            f" {samples} and strategy.global_batch_tokens {tokens:,}",
            hint="leave one of them out",
        )
    key, asked, each = "global_batch", samples, 1
    each_rank = strategy.smallest_micro_batch
    of = f"micro_batch {each_rank} x {ways} data-parallel ranks"
    if tokens and tokens_per_sample:
        key, asked, each = "global_batch_tokens", tokens, tokens_per_sample
        of = f"{each} tokens per sample x {of}"
    step = each * each_rank * ways
    if asked % step:
        raise UsageError(
            "SW_BATCH",
            f"strategy.{key} requires a multiple of {of} = {step}, got {asked}",
            hint=f"use {max(1, round(asked / step)) * step}",
        )
    return asked // each


def machine_of(job: JobConfig) -> Target:
    """The target of a job. Raises UsageError for an lnc or a network that is not there."""
    cluster = job.cluster
    target = logical(load_target(cluster.target), cluster.lnc, cluster.hypothetical, "cluster.lnc")
    if not target.trains:
        raise UsageError(
            "NCC_EARG001",
            f"cluster.target requires a machine of {NEURONX_CC}, got {target.name}: its compiler,"
            f" {target.core.compiler}, makes programs of inference alone, and no collectives"
            " between its cores are documented",
            hint="compile an inference graph with `shardwright compile MODEL --target"
            f" {target.name} --neuroncore-pipeline-cores N`, or take inf2 or trn1",
        )
    if cluster.instances > 1 and not target.efa_devices:
        raise UsageError(
            "SW_NETWORK",
            f"cluster.instances on {target.name} requires 1, got {cluster.instances}: it has no EFA"
            " devices",
            hint="use one instance, or a machine with EFA, for example trn1.32xlarge",
        )
    return target


def _check_placement(job: JobConfig, topology: Topology, mesh: Mesh) -> None:
    name = job.cluster.placement
    try:
        place_mesh(name, mesh.sizes, topology)
    except CollectiveError as error:
        known = (*words_of("cluster.placement"), *mesh.names)
        misspelt = [word for word in map(str.strip, name.split(",")) if word not in known]
        hint = "name every axis of the mesh once, from across instances to neighbouring cores"
        if misspelt:
            hint = did_you_mean(misspelt[0], known, hint)
        raise UsageError("SW_PLACEMENT", f"cluster.placement: {error}", hint=hint) from error


def _given_axes(job: JobConfig) -> dict[str, int | str]:
    axes = dataclasses.asdict(job.mesh)
    return {n: "auto" if s == AUTO else s for n, s in axes.items() if s}


def _own_mesh(job: JobConfig, own: OwnMesh, cores: int, per_instance: int) -> Mesh:
    """The step's mesh, which must fill the cores; `[mesh]` may only repeat it."""
    given = _given_axes(job)
    if given and given != own.mesh.sizes:
        shown = ",".join(f"{name}={size}" for name, size in given.items())
        raise ShardingError(
            "SW_MANUAL_MESH",
            f"[mesh] requires the mesh of the step's shardings, {own.mesh}, got {shown}",
            hint="leave [mesh] empty, or build the step's mesh from the same axes",
        )
    check_product(own.mesh, cores, per_instance)
    return own.mesh


def leaves_shards(job: JobConfig) -> bool:
    """Whether a job leaves the number of shards to us: it names no mesh, or none but the axes of a
    strategy's own, with `auto` for the shards."""
    given = _given_axes(job)
    return given.keys() <= {SHARD_AXIS, "tp"} and given.get(SHARD_AXIS, "auto") == "auto"


def remeshed(job: JobConfig, layout: Layout, mesh: Mesh, notes: tuple[Diagnostic, ...]) -> Layout:
    """The layout with another mesh that has as many data ranks, and why. Raises UsageError where
    the placement does not name its axes."""
    _check_placement(job, layout.topology, mesh)
    return dataclasses.replace(layout, mesh=mesh, findings=notes)


def with_samples(job: JobConfig, samples: int) -> JobConfig:
    """The job with a batch of as many samples, if its data-parallel ranks share them evenly."""
    if job.strategy.name == MANUAL:  # whose mesh is the step's
        return job
    each, rest = divmod(samples, layout_of(job).mesh.size(DATA_AXES))
    if rest or not each:
        return job
    strategy = dataclasses.replace(job.strategy, micro_batch=each)
    return dataclasses.replace(job, strategy=strategy)
