"""From a job to linked programs: capture, import, plan, outline, compile each distinct function
once, link.

`run` and `plan` share this road; it holds no values. Capture stays in this process, partition and
compile units go through the service. Every stage's seconds are kept for the report.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from collectives.ops import CollectiveError
from collectives.placement import place_mesh, with_atoms
from compiler.diagnostics import ShardingError, UsageError
from compiler.ir.analysis import flops
from compiler.ir.types import Graph
from compiler.isa.program import Program
from compiler.target import Target, load_target, logical
from orchestrator.collective_settings import job_settings
from orchestrator.config import JobConfig
from orchestrator.executor import WorkUnit
from orchestrator.faults import faults_of
from orchestrator.packets import packets_of
from orchestrator.service import UnitService
from orchestrator.unit_errors import UnitFailedError
from orchestrator.units import compile_payload, unit_key
from sharding.mesh import DATA_AXES, Mesh, check_product, parse_mesh
from sharding.one_sample import (
    MIXED_SAMPLES,
    PROOF_SAMPLES,
    TRACED_SAMPLES,
    Twins,
    check_means,
    is_alone,
)
from sharding.partitioned import slots
from sharding.plan import PartitionUnit, Plan, Prepared, complete, partitioned, prepare
from sharding.reroll import Rerolled, reroll
from sharding.settings import AUTO
from sharding.strategies.manual import data_ways, user_mesh
from sharding.strategies.registry import MANUAL, default_axes
from sim_cluster.network import cluster_topology

if TYPE_CHECKING:
    from compiler.frontend.shardings import ModuleShardings
    from compiler.frontend.task import TrainTask


T = TypeVar("T")


@dataclass(slots=True)
class Stages:
    """Wall-clock seconds per stage, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's time to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a job lies on its cluster: mesh, batch sizes, micro-batches."""

    target: Target
    mesh: Mesh
    captured_batch: int  # samples of one micro-batch over all data ranks
    global_batch: int
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A job whose step is partitioned and cut; nothing is compiled."""

    job: JobConfig
    layout: Layout
    graph: Graph
    traced_samples: int  # of the graph: those of a micro-batch, or more (`sharding/one_sample.py`)
    plan: Plan
    tokens_per_sample: int
    name: str
    repeats: tuple[str, ...] = ()  # what became of repeated layers, line by line

    @property
    def flops_per_step(self) -> int:
        """Every operation of the captured step, for all samples."""
        return flops(self.graph) * self.layout.global_batch // self.traced_samples

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


def layout_of(job: JobConfig, own: OwnMesh | None = None) -> Layout:
    """Mesh and batch of a job; `own` is the step's mesh, where the strategy takes that.

    Raises UsageError and ShardingError for an unknown target, an lnc it refuses, a mesh that does
    not fill the cores or is not the step's, a placement that does not name its axes, a batch that
    does not divide, packet sizes that no runtime takes, unknown thresholds of collectives, or
    faults of what is not there.
    """
    packets_of(job.strategy)
    job_settings(job.cluster.collectives)
    target = _machine(job)
    faults_of(job.faults, cluster_topology(target, job.cluster.instances))
    cores = target.cores * job.cluster.instances
    try:
        mesh = _own_mesh(job, own, cores) if own else parse_mesh(_axes_of(job), cores)
    except ShardingError as error:  # the mesh is what the user typed, not what a graph refused
        d = error.diagnostic
        raise UsageError(d.code, d.message, d.loc, d.hint) from error
    _check_placement(job, target, mesh)
    ways = own.data_ways if own else mesh.size(DATA_AXES)
    captured = job.strategy.micro_batch * ways
    global_batch = job.strategy.global_batch or captured
    if global_batch % captured:
        raise UsageError(
            "SW_BATCH",
            f"strategy.global_batch requires a multiple of micro_batch {job.strategy.micro_batch} x"
            f" {ways} data-parallel ranks = {captured}, got {global_batch}",
            None,
            f"use {max(1, round(global_batch / captured)) * captured}",
        )
    return Layout(
        target=target,
        mesh=mesh,
        captured_batch=captured,
        global_batch=global_batch,
        num_microbatches=global_batch // captured,
    )


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


def _check_placement(job: JobConfig, target: Target, mesh: Mesh) -> None:
    name = job.cluster.placement
    try:
        place_mesh(name, mesh.sizes, cluster_topology(target, job.cluster.instances))
    except CollectiveError as error:
        raise UsageError(
            "SW_PLACEMENT",
            f"cluster.placement: {error}",
            hint="name every axis of the mesh once, from across instances to neighbouring cores",
        ) from error


def _axes_of(job: JobConfig) -> dict[str, int | str]:
    """The axes of `[mesh]`, or those of the strategy."""
    return _given_axes(job) or default_axes(job.strategy.name)


def _given_axes(job: JobConfig) -> dict[str, int | str]:
    axes = dataclasses.asdict(job.mesh)
    return {n: "auto" if s == AUTO else s for n, s in axes.items() if s}


def _own_mesh(job: JobConfig, own: OwnMesh, cores: int) -> Mesh:
    """The step's mesh, which must fill the cores; `[mesh]` may only repeat it."""
    given = _given_axes(job)
    if given and given != own.mesh.sizes:
        shown = ",".join(f"{name}={size}" for name, size in given.items())
        raise ShardingError(
            "SW_MANUAL_MESH",
            f"[mesh] requires the mesh of the step's shardings, {own.mesh}, got {shown}",
            hint="leave [mesh] empty, or build the step's mesh from the same axes",
        )
    check_product(own.mesh, cores)
    return own.mesh


def _read_own_mesh(job: JobConfig, task: TrainTask) -> OwnMesh:
    """What a first capture says, of one sample per core, so that every sharding divides it."""
    from compiler.frontend.capture import capture
    from compiler.frontend.stablehlo import import_with_shardings

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
        from orchestrator.model import resolve_task

        task = resolve_task(job)
        own = _read_own_mesh(job, task) if is_own else None
    return layout or layout_of(job, own), task


def build_task(
    job: JobConfig, layout: Layout, task: TrainTask, service: UnitService, stages: Stages
) -> Built:
    """Linked programs of a task on a layout, whatever `[model]` and `[mesh]` of the job say."""
    return compile_planned(plan_task(job, layout, task, service, stages), service, stages)


def compile_planned(ready: Planned, service: UnitService, stages: Stages) -> Built:
    """A planned job with its programs."""
    programs = _compile(ready, service, stages)
    fields = {f.name: getattr(ready, f.name) for f in dataclasses.fields(Planned)}
    return Built(**fields, programs=programs)


@dataclass(frozen=True, slots=True)
class Traced:
    """A captured step, re-rolled, after the step passes, and what its module says about its
    distribution.
    """

    step: Rerolled
    samples: int
    user: ModuleShardings
    name: str


@dataclass(frozen=True, slots=True)
class Decided:
    """A captured step and what its strategy decided."""

    traced: Traced
    prepared: Prepared


def decide(
    job: JobConfig, layout: Layout, task: TrainTask, stages: Stages, use: Callable[[Decided], T]
) -> T:
    """What `use` makes of the strategy's decisions about a task. A step of one sample is tried with
    a twin first (`sharding/one_sample.py`), and as it is where its samples mix or are summed.

    Raises the DiagnosticError of the stage that refuses.
    """
    samples = layout.captured_batch
    if not is_alone(layout.mesh, job.strategy, samples, layout.num_microbatches):
        return use(_decided(job, layout, _traced(job, task, samples, stages), stages))
    try:
        twins = _traced(job, task, TRACED_SAMPLES, stages)
        with_four = _traced(job, task, PROOF_SAMPLES, stages)
        proof = check_means(twins.step.graph, with_four.step.graph)
        return use(_decided(job, layout, twins, stages, proof))
    except ShardingError as refused:
        if refused.code != MIXED_SAMPLES:
            raise
        try:
            return use(_decided(job, layout, _traced(job, task, samples, stages), stages))
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


def _traced(job: JobConfig, task: TrainTask, samples: int, stages: Stages) -> Traced:
    """The step of a task for so many samples."""
    with stages.timed("capture"):
        from compiler.frontend.capture import capture

        captured = capture(task, samples)
    with stages.timed("import"):
        from compiler.frontend.stablehlo import import_with_shardings
        from compiler.passes.pipeline import run, step_passes

        imported, user = import_with_shardings(captured.artifact, base_dir=job.base)
        rolled = Rerolled(
            graph=imported, inputs=slots(captured.inputs), outputs=slots(captured.outputs)
        )
        if job.strategy.name != MANUAL:  # whose shardings are the user's, leaf by leaf
            rolled = reroll(rolled.graph, rolled.inputs, rolled.outputs)
        rolled = dataclasses.replace(
            rolled, graph=run(rolled.graph, step_passes(job.compiler, samples))
        )
    return Traced(rolled, samples, user, captured.name)


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
        return Planned(
            job=job,
            layout=layout,
            graph=decided.traced.step.graph,
            traced_samples=decided.traced.samples,
            plan=plan,
            tokens_per_sample=task.tokens_per_sample,
            name=decided.traced.name,
            repeats=decided.traced.step.notes,
        )

    return decide(job, layout, task, stages, planned)


def partition_unit(job: JobConfig, layout: Layout, service: UnitService) -> PartitionUnit:
    """The partition unit of a job, run by its service."""

    def unit(request: bytes) -> bytes:
        key = unit_key("partition", request)
        name = f"{job.strategy.name} {layout.mesh}"
        try:
            return service.run([WorkUnit("partition", key, name, request)])[key]
        except UnitFailedError as failed:
            raise failed.error from failed

    return unit


def _compile(ready: Planned, service: UnitService, stages: Stages) -> dict[str, Program]:
    from compiler.driver import located
    from compiler.link import link
    from compiler.outline import outline

    step, target = ready.plan.step, ready.layout.target.name
    with stages.timed("outline"):
        outlined = outline(step)
        options = dataclasses.replace(ready.job.compiler, lnc=ready.layout.target.lnc)
        units = []
        names = Counter[str]()
        for function in outlined.functions:
            names[function.name] += 1
            name = f"{function.name}#{names[function.name]}"
            payload = compile_payload(function.payload, target, options)
            key = unit_key("compile", payload, target)
            units.append(WorkUnit("compile", key, name, payload))
    graphs = {unit.key: f.graph for unit, f in zip(units, outlined.functions, strict=True)}
    with stages.timed("compile"):
        try:
            results = service.run(units)
        except UnitFailedError as failed:
            raise located(failed.error, graphs[failed.unit.key]) from failed
    with stages.timed("link"):
        compiled = [results[unit.key] for unit in units]
        return link(step, outlined, compiled, target)
