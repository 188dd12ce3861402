"""From a job to linked programs: capture, import, plan, outline, compile each distinct function
once, link.

`run` and `plan` share this road; it holds no values. Capture stays in this process, partition and
compile units go through the service. Every stage's seconds are kept for the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shardwright.collectives.ops import CollectiveError
from shardwright.collectives.placement import place_mesh, with_atoms
from shardwright.collectives.topology import Topology
from shardwright.compiler.diagnostics import (
    Diagnostic,
    DiagnosticError,
    ShardingError,
    UsageError,
    did_you_mean,
)
from shardwright.compiler.ir.analysis import flops
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import Program
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import Target, load_target, logical
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.steps import is_recorded, note, within
from shardwright.orchestrator.config.collective_settings import job_settings
from shardwright.orchestrator.config.config import JobConfig, words_of
from shardwright.orchestrator.config.faults import faults_of
from shardwright.orchestrator.config.packets import packets_of
from shardwright.orchestrator.road.offload import check_offload
from shardwright.orchestrator.road.parts import Parts, parts_of
from shardwright.orchestrator.road.stages import Stages, Traced
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.service import Settled, UnitService
from shardwright.orchestrator.service.unit_errors import UnitFailedError
from shardwright.sharding.partition.mesh import (
    DATA_AXES,
    SHARD_AXIS,
    Mesh,
    check_product,
    parse_mesh,
)
from shardwright.sharding.partition.partitioned import slots
from shardwright.sharding.partition.partitioner import PartitionUnit
from shardwright.sharding.plan import Plan, Prepared, complete, partitioned, prepare
from shardwright.sharding.prepare.one_sample import (
    MIXED_SAMPLES,
    PROOF_SAMPLES,
    TRACED_SAMPLES,
    Twins,
    check_means,
    is_alone,
)
from shardwright.sharding.prepare.reroll import Rerolled
from shardwright.sharding.settings import AUTO, StrategySettings
from shardwright.sharding.strategies.decisions import zero_of
from shardwright.sharding.strategies.manual import data_ways, user_mesh
from shardwright.sharding.strategies.ranks import mesh_for_state
from shardwright.sharding.strategies.registry import MANUAL, default_axes
from shardwright.sim_cluster.timing.contention import DEFAULT_PACKETS, Packets
from shardwright.sim_cluster.timing.faults import NO_FAULTS, Faults

if TYPE_CHECKING:
    from shardwright.compiler.frontend.task import TrainTask


T = TypeVar("T")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A job whose step is partitioned and cut; nothing is compiled."""

    job: JobConfig
    layout: Layout
    graph: Graph
    traced_samples: int  # of the graph: those of a micro-batch, or more (`sharding/prepare/`)
    plan: Plan
    tokens_per_sample: int
    name: str
    loss: int = 0  # which output of the graph
    model: Rerolled | None = None  # the step without copies, where it has some (`TrainTask.model`)
    repeats: tuple[str, ...] = ()  # what became of repeated layers, line by line
    findings: tuple[Diagnostic, ...] = ()  # about the capture, and the mesh where it was left to us

    @property
    def counted(self) -> tuple[Graph, int]:
        """The step that the model's FLOPs are counted on, with every part of it once, and which of
        its outputs the loss is."""
        if self.model is None:
            return self.graph, self.loss
        return self.model.graph, _loss_of(self.model)

    @property
    def flops_per_step(self) -> int:
        """Every operation of the captured step, for all samples."""
        return self.of_a_step(flops(self.graph))

    def of_a_step(self, count: int) -> int:
        """For all samples of a step what the graph has `count` of."""
        return count * self.layout.global_batch // self.traced_samples

    @property
    def placement(self) -> str:
        """The job's placement for the mesh of the plan, whose axes may be parts of the job's."""
        return with_atoms(self.job.cluster.placement, self.plan.mesh.atoms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built(Planned):
    """A job ready to be written, run and timed."""

    programs: Mapping[str, Program]


@dataclass(frozen=True, slots=True)
class OwnMesh:
    """The mesh a step names itself (strategy manual), and into how many parts it cuts samples."""

    mesh: Mesh
    data_ways: int


def layout_of(job: JobConfig, own: OwnMesh | None = None, tokens_per_sample: int = 0) -> Layout:
    """Mesh and batch of a job; `own` is the step's mesh, where the strategy takes that. A batch in
    tokens counts once it is known how many a sample has. A micro-batch that is to be chosen lies
    as one of 1 does.

    Raises UsageError and ShardingError for an unknown target, an lnc it refuses, a mesh that does
    not fill the cores or is not the step's, a placement that does not name its axes, a batch that
    does not divide, packet sizes that no runtime takes, unknown thresholds of collectives, or
    faults of what is not there.
    """
    packets = packets_of(job.strategy)
    collectives = job_settings(job.cluster.collectives)
    target = _machine(job)
    topology = cluster_topology(target, job.cluster.instances)
    faults = faults_of(job.faults, topology)
    cores = target.cores * job.cluster.instances
    each = target.cores if target.efa_devices else 0  # else there is one instance
    try:
        if own:
            mesh = _own_mesh(job, own, cores, each)
        else:
            mesh = parse_mesh(_axes_of(job), cores, per_instance=each)
    except ShardingError as error:  # the mesh is what the user typed, not what a graph refused
        d = error.diagnostic
        raise UsageError(d.code, d.message, d.loc, d.hint) from error
    _check_placement(job, topology, mesh)
    ways = own.data_ways if own else mesh.size(DATA_AXES)
    captured = job.strategy.smallest_micro_batch * ways
    global_batch = asked_batch(job.strategy, ways, tokens_per_sample) or captured
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


def asked_batch(strategy: StrategySettings, ways: int, tokens_per_sample: int) -> int:
    """The samples of a step as they are asked for; 0 where they are not, or not known yet. Raises
    UsageError."""
    samples, tokens = strategy.global_batch, strategy.global_batch_tokens
    if samples and tokens:
        raise UsageError(
            "SW_BATCH",
            "a batch requires samples or tokens, got strategy.global_batch"
            f" {samples} and strategy.global_batch_tokens {tokens:,}",
            None,
            "leave one of them out",
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
            None,
            f"use {max(1, round(asked / step)) * step}",
        )
    return asked // each


def _machine(job: JobConfig) -> Target:
    """The target of a job. Raises UsageError for an lnc or a network that is not there."""
    cluster = job.cluster
    target = logical(load_target(cluster.target), cluster.lnc, cluster.hypothetical, "cluster.lnc")
    if not target.is_compiled_for:
        raise UsageError(
            "NCC_EARG001",
            f"cluster.target requires a machine with NeuronCore-v2 or newer, got {target.name}",
            hint="inf1 is the machine of neuron-cc; `shardwright nccom --target` takes it",
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
        raise UsageError(
            "SW_PLACEMENT",
            f"cluster.placement: {error}",
            hint=_placement_hint(name, mesh),
        ) from error


def _placement_hint(name: str, mesh: Mesh) -> str:
    """What to do about a placement that is refused."""
    known = (*words_of("cluster.placement"), *mesh.names)
    misspelt = [word for word in map(str.strip, name.split(",")) if word not in known]
    whole = "name every axis of the mesh once, from across instances to neighbouring cores"
    return did_you_mean(misspelt[0], known, whole) if misspelt else whole


def _axes_of(job: JobConfig) -> dict[str, int | str]:
    """The axes of `[mesh]`, or those of the strategy."""
    return _given_axes(job) or default_axes(job.strategy.name)


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


def _read_own_mesh(job: JobConfig, task: TrainTask) -> OwnMesh:
    """What a first capture says, of one sample per core, so that every sharding divides it."""
    from shardwright.compiler.frontend.capture import capture
    from shardwright.compiler.frontend.stablehlo import import_with_shardings

    captured = capture(task, _machine(job).cores * job.cluster.instances)
    graph, user = import_with_shardings(captured.artifact, base_dir=job.base)
    return OwnMesh(user_mesh(user), data_ways(graph, slots(captured.inputs), user))


def build(job: JobConfig, service: UnitService, stages: Stages) -> Built:
    """Everything up to linked programs.

    Raises the DiagnosticError of the stage that refuses.
    """
    return compile_planned(planned(job, service, stages), service, stages)


def planned(job: JobConfig, service: UnitService, stages: Stages) -> Planned:
    """Everything up to the plan. Raises the DiagnosticError of the stage that refuses."""
    layout, task = placed_task(job, stages)
    return plan_task(job, layout, task, service, stages)


def placed_task(job: JobConfig, stages: Stages) -> tuple[Layout, TrainTask]:
    """The task of a job and where it lies. Raises UsageError, as `layout_of`."""
    is_own = job.strategy.name == MANUAL
    layout = None if is_own else layout_of(job)
    with stages.timed("capture"):
        task = stages.traces.task(job)
        own = _read_own_mesh(job, task) if is_own else None
    if layout is None or job.strategy.global_batch_tokens:
        layout = layout_of(job, own, task.tokens_per_sample)
    if is_own or not _leaves_shards(job):
        return layout, task
    return _with_shared_state(job, layout, task, stages), task


def _leaves_shards(job: JobConfig) -> bool:
    """Whether a job leaves the number of shards to us: it names no mesh, or none but the axes of a
    strategy's own, with `auto` for the shards."""
    given = _given_axes(job)
    return given.keys() <= {SHARD_AXIS, "tp"} and given.get(SHARD_AXIS, "auto") == "auto"


def _with_shared_state(job: JobConfig, layout: Layout, task: TrainTask, stages: Stages) -> Layout:
    """The layout of a job that leaves the number of shards to us, with as many ranks sharing the
    state as its weights divide by; samples lie as before, so that the step is traced once."""
    if layout.mesh.sizes.get(SHARD_AXIS, 1) == 1 or not zero_of(job.strategy):
        return layout
    traced = stages.trace(job, task, layout.captured_batch)
    mesh, notes = mesh_for_state(*traced.step.parts, layout.mesh, job.strategy)
    if mesh == layout.mesh:
        return layout
    _check_placement(job, layout.topology, mesh)
    return dataclasses.replace(layout, mesh=mesh, findings=notes)


def build_task(
    job: JobConfig, layout: Layout, task: TrainTask, service: UnitService, stages: Stages
) -> Built:
    """Linked programs of a task on a layout, whatever `[model]` and `[mesh]` of the job say."""
    return compile_planned(plan_task(job, layout, task, service, stages), service, stages)


def compile_planned(ready: Planned, service: UnitService, stages: Stages) -> Built:
    """A planned job with its programs. Raises the DiagnosticError of the stage that refuses."""
    parts = compile_parts(ready, stages)
    with stages.timed("compile"):
        settled = service.settle(parts.units)
    return with_programs(ready, parts, settled, stages)


def compile_parts(ready: Planned, stages: Stages) -> Parts:
    """The compile units of a planned job. Raises CompileError for loops that cannot be cut."""
    from shardwright.compiler.outline import outline

    options = dataclasses.replace(ready.job.compiler, lnc=ready.layout.target.lnc)
    target = ready.layout.target.name
    with stages.timed("outline"):
        parts = parts_of(outline(ready.plan.step), target, options)
    if is_recorded():
        show_functions(parts, options)
    return parts


def show_functions(parts: Parts, options: CompileOptions) -> None:
    """Every distinct function compiled here, with the user's locations, for who records steps; what
    is linked comes from the units. A refusal is recorded, and is theirs to tell.
    """
    from shardwright.compiler.driver import compile_unit

    for unit in parts.outlined.functions:
        with suppress(DiagnosticError):
            compile_unit(unit, parts.target, options)


def with_programs(ready: Planned, parts: Parts, settled: Settled, stages: Stages) -> Built:
    """A planned job with the programs of its settled units. Raises the first unit's error."""
    from shardwright.compiler.linking.link import link

    with stages.timed("link"):
        programs = link(ready.plan.step, parts.outlined, parts.compiled(settled), parts.target)
    fields = {f.name: getattr(ready, f.name) for f in dataclasses.fields(Planned)}
    built = Built(**fields, programs=programs)
    note("memory", lambda: _memory(built))
    return built


def _memory(built: Built) -> str:
    from shardwright.orchestrator.dump.step import memory_text

    return memory_text(built)


@dataclass(frozen=True, slots=True)
class Decided:
    """A captured step and what its strategy decided."""

    traced: Traced
    prepared: Prepared


def decide(
    job: JobConfig, layout: Layout, task: TrainTask, stages: Stages, use: Callable[[Decided], T]
) -> T:
    """What `use` makes of the strategy's decisions about a task. A step of one sample is tried with
    a twin first (`sharding/prepare/one_sample.py`), and as it is where its samples mix or are
    summed.

    Raises the DiagnosticError of the stage that refuses.
    """
    samples = layout.captured_batch
    if not is_alone(layout.mesh, job.strategy, samples, layout.num_microbatches):
        return use(_decided(job, layout, stages.trace(job, task, samples), stages))
    try:
        twins = stages.trace(job, task, TRACED_SAMPLES)
        with within("proof"):
            with_four = stages.trace(job, task, PROOF_SAMPLES)
        proof = check_means(twins.step.graph, with_four.step.graph)
        return use(_decided(job, layout, twins, stages, proof))
    except ShardingError as refused:
        if refused.code != MIXED_SAMPLES:
            raise
        told = refused
        note("set_aside", lambda: f"{told.diagnostic.render()}\n")
        try:
            return use(_decided(job, layout, stages.trace(job, task, samples), stages))
        except ShardingError:
            raise refused from None


def _decided(
    job: JobConfig, layout: Layout, traced: Traced, stages: Stages, twins: Twins | None = None
) -> Decided:
    """The decisions about a traced step; `twins` is the proof for one with a second sample."""
    with stages.timed("recipe"):
        step = traced.step.parts
        prepared = prepare(*step, layout.mesh, job.strategy, traced.user, twins)
    return Decided(traced, prepared)


def plan_task(
    job: JobConfig, layout: Layout, task: TrainTask, service: UnitService, stages: Stages
) -> Planned:
    """The plan of a task on a layout, whatever `[model]` and `[mesh]` of the job say."""
    unit = partition_unit(job, layout, service)

    def planned(decided: Decided) -> Planned:
        with stages.timed("partition"):
            answer = partitioned(decided.prepared, unit)
        with stages.timed("localize"):
            plan = complete(decided.prepared, answer, num_microbatches=layout.num_microbatches)
        check_offload(plan.step, layout.target)
        traced = decided.traced
        return Planned(
            job=job,
            layout=layout,
            graph=traced.step.graph,
            traced_samples=traced.samples,
            plan=plan,
            tokens_per_sample=task.tokens_per_sample,
            name=traced.name,
            loss=_loss_of(traced.step),
            model=_model(job, task, traced.samples, stages),
            repeats=traced.step.notes,
            findings=(*traced.findings, *layout.findings),
        )

    return decide(job, layout, task, stages, planned)


def _loss_of(step: Rerolled) -> int:
    return [slot.name for slot in step.outputs].index("metrics/loss")


def _model(job: JobConfig, task: TrainTask, samples: int, stages: Stages) -> Rerolled | None:
    """The step of as many samples without the copies that a task says it has."""
    if task.model is None:
        return None
    with within("model"):
        return stages.trace(job, task.model, samples).step


def partition_unit(job: JobConfig, layout: Layout, service: UnitService) -> PartitionUnit:
    """The partition unit of a job, run by its service."""

    def unit(request: bytes) -> bytes:
        partition = WorkUnit.of("partition", f"{job.strategy.name} {layout.mesh}", request)
        try:
            return service.run([partition])[partition.key]
        except UnitFailedError as failed:
            raise failed.error from failed

    return unit
