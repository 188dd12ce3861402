"""From a job to linked programs: capture, import, plan, outline, compile each distinct function
once, link.

`run` and `plan` share this road; it holds no values. Capture stays in this process, partition and
compile units go through the service. Every stage's seconds are kept for the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from shardwright.collectives.placement import with_atoms
from shardwright.compiler.diagnostics import Diagnostic, DiagnosticError, ShardingError
from shardwright.compiler.frontend.task import Mode, TrainTask
from shardwright.compiler.ir.analysis import flops
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import Program
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline import outline
from shardwright.compiler.steps import is_recorded, note, within
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.layout import Layout
from shardwright.orchestrator.road.capture import placed_task
from shardwright.orchestrator.road.offload import check_offload
from shardwright.orchestrator.road.parts import Parts, parts_of
from shardwright.orchestrator.road.stages import Stages, Traced
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.service import Settled, UnitService
from shardwright.orchestrator.service.unit_errors import UnitFailedError
from shardwright.sharding.partition.mesh import DATA_AXES
from shardwright.sharding.partition.partitioner import PartitionUnit
from shardwright.sharding.plan import Plan, Prepared, complete, partitioned, prepare
from shardwright.sharding.prepare.phantom_replica import (
    MIXED_SAMPLES,
    PROOF_SAMPLES,
    TRACED_SAMPLES,
    MeanProof,
    check_means,
    needs_phantom,
)
from shardwright.sharding.prepare.reroll import Rerolled


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A job whose step is partitioned and cut; nothing is compiled."""

    job: JobConfig
    layout: Layout
    graph: Graph
    traced_samples: int  # of the graph: those of a micro-batch, or more (`sharding/prepare/`)
    prepared: Prepared  # what the strategy decided
    plan: Plan
    tokens_per_sample: int
    name: str
    mode: Mode = Mode.TRAIN
    context: int = 0  # positions of the cache of inference
    loss: int = 0  # which output of the graph: of inference the logits
    roles: tuple[str, ...] = ()  # of the inputs of the graph
    model: Rerolled | None = None  # the step without copies, where it has some (`TrainTask.model`)
    repeats: tuple[str, ...] = ()  # what became of repeated layers, line by line
    told: tuple[str, ...] = ()  # how the step is called and answers (`Captured.told`)
    findings: tuple[Diagnostic, ...] = ()  # about the capture, and the mesh where it was left to us

    @property
    def counted(self) -> tuple[Graph, int]:
        """The step that the model's FLOPs are counted on, with every part of it once, and which of
        its outputs the loss is."""
        if self.model is None:
            return self.graph, self.loss
        return self.model.graph, _loss_of(self.model, self.mode)

    @property
    def counted_roles(self) -> tuple[str, ...]:
        """The roles of the inputs of that step."""
        return self.roles if self.model is None else _roles_of(self.model)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to trace a step: with how many samples. With `proof_samples` above 0 the step must take
    the mean over its samples, which a trace with those proves. `set_aside_by` is the code of the
    refusal that the next candidate may not meet; every other one is the job's."""

    samples: int
    proof_samples: int = 0
    set_aside_by: str = ""


def candidates(job: JobConfig, layout: Layout, mode: Mode) -> tuple[Candidate, ...]:
    """How the step of a job may be traced, in the order in which that is tried. One sample alone
    that is trained on gets a phantom replica (`sharding/prepare/phantom_replica.py`), unless
    samples mix or are summed."""
    asked = Candidate(samples=layout.captured_batch)
    how = layout.mesh, job.strategy, asked.samples, layout.num_microbatches
    if not mode.trains or not needs_phantom(*how):
        return (asked,)
    phantom = Candidate(
        samples=TRACED_SAMPLES, proof_samples=PROOF_SAMPLES, set_aside_by=MIXED_SAMPLES
    )
    return phantom, asked


def build(job: JobConfig, service: UnitService, stages: Stages) -> Built:
    """Everything up to linked programs. Raises the DiagnosticError of the stage that refuses."""
    return compile_planned(planned(job, service, stages), service, stages)


def built_again(job: JobConfig) -> Built:
    """A job as its report has it, of stored units, for who explains that. Raises as `build`."""
    with unit_service(job, None) as service:
        return build(job, service, Stages())


def planned(job: JobConfig, service: UnitService, stages: Stages) -> Planned:
    """Everything up to the plan. Raises the DiagnosticError of the stage that refuses."""
    layout, task = placed_task(job, stages)
    return plan_task(job, layout, task, service, stages)


def build_task(
    job: JobConfig, layout: Layout, task: TrainTask, service: UnitService, stages: Stages
) -> Built:
    """Linked programs of a task on a layout, whatever `[model]` and `[mesh]` of the job say."""
    return compile_planned(plan_task(job, layout, task, service, stages), service, stages)


def plan_task(
    job: JobConfig, layout: Layout, task: TrainTask, service: UnitService, stages: Stages
) -> Planned:
    """The plan of a task on a layout, whatever `[model]` and `[mesh]` of the job say: that of the
    first candidate that is not refused. Raises the last refusal, or what made it necessary to cut
    a step without its sample dim."""
    refused: ShardingError | None = None
    for candidate in candidates(job, layout, task.mode):
        try:
            return _planned(candidate, job, layout, task, service, stages)
        except ShardingError as error:
            if refused is not None:
                if error.code in _UNCUT:
                    raise refused from error
                raise
            if error.code != candidate.set_aside_by:
                raise
            refused = error
            _note_refusal(error)
    raise AssertionError("the last candidate is set aside by nothing")


_UNCUT = ("SW_STAGES_CUT", "SW_PIPELINE_CUT")


def _note_refusal(refused: ShardingError) -> None:
    note("set_aside", lambda: f"{refused.diagnostic.render()}\n")


def _planned(
    candidate: Candidate,
    job: JobConfig,
    layout: Layout,
    task: TrainTask,
    service: UnitService,
    stages: Stages,
) -> Planned:
    """The plan of a task that is traced in one way."""
    if candidate.proof_samples:
        traced, proof = _proven(candidate, job, task, stages)
    else:
        traced, proof = stages.trace(job, task, candidate.samples), None
    with stages.timed("recipe"):
        prepared = prepare(*traced.step.parts, layout.mesh, job.strategy, traced.user, proof)
    with stages.timed("partition"):
        answer = partitioned(prepared, partition_unit(job, layout, service))
    with stages.timed("localize"):
        plan = complete(prepared, answer, num_microbatches=layout.num_microbatches)
    check_offload(plan.step, layout.target)
    return Planned(
        job=job,
        layout=layout,
        graph=traced.step.graph,
        traced_samples=traced.samples,
        prepared=prepared,
        plan=plan,
        tokens_per_sample=task.tokens_per_sample,
        name=traced.name,
        mode=task.mode,
        context=task.context,
        loss=_loss_of(traced.step, task.mode),
        roles=_roles_of(traced.step),
        model=_model(job, task, traced.samples, stages),
        repeats=traced.step.notes,
        told=(*traced.told, *_other_samples(task, layout)),
        findings=(*traced.findings, *layout.findings),
    )


def _other_samples(task: TrainTask, layout: Layout) -> Iterator[str]:
    """That the step is not of as many samples as the user's example."""
    if task.samples not in (0, layout.global_batch):
        ways = layout.mesh.size(DATA_AXES)
        each, rest = divmod(task.samples, ways)
        cure = f"strategy.micro_batch={each}" if each and not rest else f"no multiple of {ways}"
        yield f"{layout.global_batch} samples; the example has {task.samples} ({cure})"


def _loss_of(step: Rerolled, mode: Mode) -> int:
    return [slot.name for slot in step.outputs].index(f"metrics/{mode.result}")


def _roles_of(step: Rerolled) -> tuple[str, ...]:
    return tuple(slot.role for slot in step.inputs)


def _proven(
    candidate: Candidate, job: JobConfig, task: TrainTask, stages: Stages
) -> tuple[Traced, MeanProof]:
    """A trace with the samples of a candidate, and the proof that it takes the mean over them.
    Raises ShardingError SW_ONE_SAMPLE."""
    try:
        traced = stages.trace(job, task, candidate.samples)
        with within("proof"):
            more = stages.trace(job, task, candidate.proof_samples)
    except DiagnosticError as error:
        raise ShardingError(
            MIXED_SAMPLES,
            f"micro-batches of one sample require a step that can be traced with"
            f" {candidate.samples} and {candidate.proof_samples}, got {error.code}",
            error.diagnostic.loc,
            "use strategy.micro_batch = 2",
        ) from error
    return traced, check_means(traced.step.graph, more.step.graph)


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


def compile_planned(ready: Planned, service: UnitService, stages: Stages) -> Built:
    """A planned job with its programs. Raises the DiagnosticError of the stage that refuses."""
    parts = compile_parts(ready, stages)
    with stages.timed("compile"):
        settled = service.settle(parts.units)
    return with_programs(ready, parts, settled, stages)


def compile_parts(ready: Planned, stages: Stages) -> Parts:
    """The compile units of a planned job. Raises CompileError for loops that cannot be cut."""
    options = dataclasses.replace(ready.job.compiler, lnc=ready.layout.target.lnc)
    target = ready.layout.target.name
    with stages.timed("outline"):
        parts = parts_of(outline(ready.plan.step), target, options)
    if is_recorded():
        show_functions(parts, options)
    return parts


def show_functions(parts: Parts, options: CompileOptions) -> None:
    """Every distinct function compiled here, with the user's locations, for who records steps; what
    is linked comes from the units. A refusal is recorded, and is theirs to tell."""
    from shardwright.compiler.driver import compile_unit

    for unit in parts.outlined.functions:
        with suppress(DiagnosticError):
            compile_unit(unit, parts.target, options)


def with_programs(ready: Planned, parts: Parts, settled: Settled, stages: Stages) -> Built:
    """A planned job with the programs of its settled units. Raises the first unit's error."""
    from shardwright.compiler.linking.link import link
    from shardwright.orchestrator.dump.step import memory_text

    with stages.timed("link"):
        programs = link(ready.plan.step, parts.outlined, parts.compiled(settled), parts.target)
    fields = {f.name: getattr(ready, f.name) for f in dataclasses.fields(Planned)}
    built = Built(**fields, programs=programs)
    note("memory", lambda: memory_text(built))
    return built
