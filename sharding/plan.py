"""From a captured step to a `Plan`: recipe, partition, rewrite, localize, cut, footprint.

`prepare`, `partitioned` and `complete` are its parts, for callers that time them and run the
partition unit (bytes to bytes) elsewhere. A graph with repeats is partitioned in its deduplicated
form (`prepare/dedup.py`). The plan is what compilation, the loader and the report read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from shardwright.compiler.diagnostics import Diagnostic, DiagnosticError
from shardwright.compiler.frontend.shardings import ModuleShardings
from shardwright.compiler.ir.traits import TRAFFIC
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.neff.schedule import STAGE_AXIS, counted_runs, run_counts
from shardwright.compiler.program import StepPlan
from shardwright.compiler.rewriting.driver import in_programs
from shardwright.compiler.steps import note
from shardwright.sharding import shown
from shardwright.sharding.cut.overlap.assign import Shifts
from shardwright.sharding.cut.overlap.layers import overlap
from shardwright.sharding.cut.overlap.streams import is_layer_loop
from shardwright.sharding.cut.pipeline.balance import PartShare, stage_sizes
from shardwright.sharding.cut.pipeline.unstack import Staged
from shardwright.sharding.cut.rewrites import (
    CUT,
    DIVIDED,
    HOST,
    LOCALIZED,
    PARTITIONED,
    REDUCED,
    REDUCTIONS_LAST,
    REWRITTEN,
    RING,
    STORED,
    SUMMED,
)
from shardwright.sharding.memory.footprint import Footprint, footprint
from shardwright.sharding.partition.findings import with_findings
from shardwright.sharding.partition.mesh import ONE_CORE, SHARD_AXIS, Mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sharding.partition.partitioner import PartitionUnit
from shardwright.sharding.partition.shardy import annotated_text
from shardwright.sharding.prepare.dedup import Deduped
from shardwright.sharding.prepare.expand import ExpandError
from shardwright.sharding.prepare.phantom_replica import PHANTOM_AXIS, MeanProof, with_phantom
from shardwright.sharding.prepare.rewrites import (
    DEDUPED,
    EXPANDED_REPEATS,
    REDUCE_DTYPE,
    ROUNDED,
    STAGED,
    WITHOUT_PHANTOM,
)
from shardwright.sharding.settings import DEFAULTS, MANUAL, StrategySettings
from shardwright.sharding.strategies import Recipe
from shardwright.sharding.strategies.registry import RECIPE, padded_step
from shardwright.sharding.strategies.state import REPLICATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All collectives of one kind over the same axes in one program, per step.

    Units: `count` and `total_bytes` are per core and step, loop trips and micro-batches counted;
    bytes are of the larger of source and result (the nccom convention).
    """

    program: str
    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A decided strategy, ready for the partition unit; `deduped` is None for a graph without
    repeats, `staged` for a mesh without `pp`; `stacks` are the user's leaves in stacks of layers;
    with `has_phantom` the mesh has a rank for a second sample (`phantom_replica.py`).

    `mesh` is that of one stage: stages partition alike.
    """

    settings: StrategySettings
    mesh: Mesh
    recipe: Recipe
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    deduped: Deduped | None
    stacks: Mapping[str, tuple[str, ...]]
    num_stages: int = 1
    staged: Staged | None = None
    has_phantom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step for one mesh and strategy.

    `reasons` says per leaf who decided its layout; `findings` is what the user should know; `parts`
    what each part of a pipeline has, part k on stage k modulo stages; `context_bytes` are those of
    keys and values that a layer gathers, where the sequence is split.
    """

    step: StepPlan
    mesh: Mesh
    strategy: str
    footprint: Footprint
    traffic: tuple[Traffic, ...]
    reasons: Mapping[str, str]
    findings: tuple[Diagnostic, ...]
    parts: tuple[PartShare, ...] = ()
    context_bytes: int = 0


def prepare(
    graph: Graph,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    mesh: Mesh,
    settings: StrategySettings = DEFAULTS,
    user: ModuleShardings | None = None,
    proof: MeanProof | None = None,
) -> Prepared:
    """Share layers out over stages, pad what does not divide, run the recipe and deduplicate what
    it annotated.

    Raises ShardingError.
    """
    mesh = mesh if mesh.axes else ONE_CORE
    if proof is not None:
        proof.check(graph, inputs, mesh)
    graph = ROUNDED(graph, inputs, settings)
    stacks = {slot.name: slot.leaves for slot in inputs if slot.leaves}
    staged = None
    stages = 1 if settings.name == MANUAL else mesh.sizes.get(STAGE_AXIS, 1)
    if stages > 1:
        parts = stages * (settings.stage_parts if settings.schedule == "interleaved" else 1)
        staged = STAGED(
            graph,
            inputs,
            outputs,
            parts,
            settings.stage_balance,
            stage_sizes(settings.stage_layers),
        )
        graph, inputs, outputs = staged.graph, staged.inputs, staged.outputs
        mesh = mesh.without(STAGE_AXIS)
    mesh = with_phantom(mesh) if proof is not None else mesh
    graph, inputs, outputs, notes = padded_step(graph, inputs, outputs, mesh, settings)
    recipe = RECIPE(graph, inputs, outputs, mesh, settings, user)
    # Replicas that do not exist need not share the state.
    told = [f for f in recipe.findings if proof is None or f.code != REPLICATED]
    recipe = replace(recipe, findings=(*notes, *told))
    note("decisions", lambda: shown.recipe_text(recipe, inputs, outputs))
    # What the partitioner is free to choose, it may choose otherwise for a part of the graph.
    is_decided = recipe.predicted is not None
    deduped = DEDUPED(recipe.graph, recipe.specs, inputs, outputs) if is_decided else None
    return Prepared(
        settings=settings,
        mesh=recipe.mesh,
        recipe=recipe,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        deduped=deduped,
        stacks=stacks,
        num_stages=stages,
        staged=staged,
        has_phantom=proof is not None,
    )


def partitioned(prepared: Prepared, unit: PartitionUnit) -> PartitionedGraph:
    """What the partition unit makes of the step: of its deduplicated form, or of the whole graph
    when that is refused or does not carry over, so that refusals name the user's lines.

    Raises ShardingError.
    """
    inputs, outputs, recipe = prepared.inputs, prepared.outputs, prepared.recipe
    if (deduped := prepared.deduped) is not None:
        short = (deduped.graph, prepared.mesh, deduped.specs, deduped.inputs, deduped.outputs)
        note("shardy_input", lambda: annotated_text(*short[:3]), "mlir")
        with suppress(DiagnosticError, ExpandError):
            return EXPANDED_REPEATS(deduped, PARTITIONED(*short, unit=unit), inputs, outputs)
    whole = (recipe.graph, prepared.mesh, recipe.specs, inputs, outputs, recipe.tied)
    note("shardy_input", lambda: annotated_text(*whole[:3]), "mlir")
    return PARTITIONED(*whole, unit)


def complete(prepared: Prepared, answer: PartitionedGraph, num_microbatches: int = 1) -> Plan:
    """Everything after partitioning. Raises ShardingError."""
    settings = prepared.settings
    dropped = (PHANTOM_AXIS,) if prepared.has_phantom else ()
    found = with_findings(REWRITTEN(answer), prepared.recipe, dropped)
    source = REDUCE_DTYPE(found, settings)
    local, context = RING(LOCALIZED(source), settings.context)
    partial = None
    if prepared.has_phantom:
        local, partial = WITHOUT_PHANTOM(local)
    last = num_microbatches > 1 and settings.gradient_reduction != "each"
    if last:
        in_own_type = settings.gradient_reduction == "last" or settings.reduce_dtype != "auto"
        local = replace(local, graph=REDUCTIONS_LAST(local.graph, in_own_type))
    has_loops = any(map(is_layer_loop, local.graph.ops))
    plan = CUT(
        local,
        num_microbatches=num_microbatches,
        reshard_after_forward=settings.reshard_after_forward
        and (settings.reshard_root or not has_loops),
        reduce_last=last,
        wide=settings.accumulate_dtype == "float32",
        partial=partial,
    )
    mesh = local.source.mesh
    if prepared.staged is not None:
        plan = DIVIDED(plan, prepared.staged, prepared.num_stages, settings.schedule)
        mesh = mesh.with_major(STAGE_AXIS, prepared.num_stages)
    if num_microbatches > 1 and settings.gradient_reduction == "last":
        plan = STORED(REDUCED(plan))
    plan = HOST(in_programs(plan, SUMMED, settings.gradient_accumulation_fusion))
    plan = overlap(
        plan,
        Shifts(settings.early_all_gather_shift, settings.late_reduce_scatter_shift),
        settings.cc_streams,
        settings.bucket_mb << 20,
        settings.dependency_tokens,
        settings.layers_per_group,
        settings.root_unit,
    )
    plan = replace(plan, stacks=prepared.stacks)
    note("plan", lambda: shown.plan_text(plan))
    cut_findings = plan.metadata["findings"]
    assert isinstance(cut_findings, tuple)
    rows = traffic(plan)
    if not settings.reshard_after_forward:
        cut_findings += tuple(_gathers_left(rows))
    elif not settings.reshard_root and not has_loops:
        cut_findings += (_no_root(),)
    return Plan(
        step=plan,
        mesh=mesh,
        strategy=settings.name,
        footprint=footprint(plan),
        traffic=rows,
        reasons={**_reasons(prepared.recipe, source), **context.reasons},
        findings=(*source.findings, *context.findings, *cut_findings),
        parts=prepared.staged.shares if prepared.staged else (),
        context_bytes=context.gathered_bytes,
    )


def _reasons(recipe: Recipe, part: PartitionedGraph) -> dict[str, str]:
    """Who decided each leaf; what the recipe left open was placed by propagation."""
    open_ones = {
        slot.name: f"{part.specs[value]}: propagation"
        for slot, value in zip(part.inputs, part.graph.inputs, strict=True)
        if slot.name not in recipe.reasons
    }
    return {**recipe.reasons, **open_ones}


def _no_root() -> Diagnostic:
    """The note about a root that is not told from layers."""
    return Diagnostic(
        "SW_RESHARD",
        "strategy.reshard_root=false requires layers that are a loop, so that they are told from"
        " what lies outside of them; got none, and all weights are gathered again",
        hint="set strategy.reshard_after_forward=false to keep all",
        severity="note",
    )


def _gathers_left(rows: Sequence[Traffic]) -> Iterator[Diagnostic]:
    """A note when weights are gathered again although they were to be kept."""
    backward = (r for r in rows if r.program.partition(".")[0] == "backward")  # of any part
    again = sum(r.count for r in backward if r.kind == "all_gather" and SHARD_AXIS in r.axes)
    if again:
        yield Diagnostic(
            "SW_RESHARD",
            f"strategy.reshard_after_forward=false could not keep every gathered weight: backward "
            f"still runs {again} all_gather over {SHARD_AXIS}",
            hint="slice weights in loops by the loop's own counter, whole layers at a time",
            severity="note",
        )


def traffic(step: StepPlan) -> tuple[Traffic, ...]:
    """The collectives of a step, by program, kind and axes, in program order; what stages send
    each other is a collective_permute of the program that makes it.
    """
    repeats = sum((run_counts(schedule) for schedule in step.schedules), Counter[str]())
    sends = sum((counted_runs(schedule) for schedule in step.schedules), Counter[str]())
    counts: Counter[tuple[str, str, tuple[str, ...], int]] = Counter()
    sizes = counts.copy()
    for program in step.programs:
        for op, times in _collectives(program.graph, repeats[program.name]):
            key = (program.name, op.name, op.attrs.axes, op.attrs.group_size)
            counts[key] += times
            sizes[key] += times * max(v.type.num_bytes for v in (*op.operands, *op.results))
    for transfer in step.transfers:
        times = 1 if transfer.once else sends[transfer.writer]
        key = (transfer.writer, "collective_permute", (STAGE_AXIS,), step.mesh[STAGE_AXIS])
        counts[key] += times
        sizes[key] += times * transfer.num_bytes
    return tuple(
        Traffic(
            program=program,
            kind=kind,
            axes=axes,
            group_size=group_size,
            count=count,
            total_bytes=total,
        )
        for ((program, kind, axes, group_size), count), total in zip(
            counts.items(), sizes.values(), strict=True
        )
    )


def _collectives(graph: Graph, times: int) -> Iterator[tuple[Op, int]]:
    """Collectives of a graph and how often each runs."""
    for op in graph.ops:
        if op.name in TRAFFIC:
            yield op, times
        for region in op.regions:
            yield from _collectives(region, times * op.attrs.trip)
