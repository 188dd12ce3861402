"""`report.json`, schema version 1: assembled from the stages' results, never computed twice.

See `docs/report.md`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from shardwright.collectives.placement import place_mesh, where
from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.frontend.roles import PARAMETER_ROLES
from shardwright.compiler.ir.analysis import count_ops
from shardwright.compiler.isa.program import Call, Function, Program, Repeat
from shardwright.compiler.linking.budget import count_instructions
from shardwright.compiler.machine.target import PS_PER_S, Target, hypothetical_text
from shardwright.compiler.passes.integers import downcasts
from shardwright.orchestrator.report.bottleneck import bottleneck
from shardwright.orchestrator.report.goal import bought
from shardwright.orchestrator.report.goodput import assumed, goodput_section
from shardwright.orchestrator.report.inference_rates import inference_section
from shardwright.orchestrator.report.leaf_roles import role_rows
from shardwright.orchestrator.report.limits import (
    EXTRAPOLATED,
    Confidence,
    asked,
    confidence,
    limits_section,
)
from shardwright.orchestrator.report.memory_report import memory_section
from shardwright.orchestrator.report.rates import product_types, step_flops
from shardwright.orchestrator.report.resolved import resolved_keys
from shardwright.orchestrator.report.step_report import function_rows, step_chart, timelines
from shardwright.orchestrator.report.text import Facts, share_text
from shardwright.orchestrator.road.budgets import budget_findings
from shardwright.orchestrator.road.build import Built
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import Timings
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.validation.published_mfu import best_run
from shardwright.sharding.cut.pipeline.balance import by_stage
from shardwright.sharding.cut.pipeline.schedules import bubble
from shardwright.sharding.partition.mesh import DATA_AXES, Mesh
from shardwright.sim_cluster.timing.faults import ranges, waiting
from shardwright.sim_cluster.timing.step_time import StepTiming

SCHEMA = 1
FEW_MICROBATCHES = 2  # per stage: below, a note says what more would do


def base_report(
    built: Built,
    timings: Timings,
    service: UnitService,
    stages: Stages,
    neff_bytes: Mapping[str, int],
) -> dict[str, Any]:
    """Everything but values: what `plan` returns and `run` extends."""
    timing, layout = timings.chosen, built.layout
    goodput = goodput_section(built, timing) if built.mode.trains else None
    about = asked(built.job, layout.target, layout.mesh.sizes)
    report = {
        "schema": SCHEMA,
        "job": built.job.as_dict(),
        "resolved": resolved_keys(built, goodput),
        "provenance": provenance(stages),
        "graph": graph_section(built),
        "mesh": dict(layout.mesh.sizes),
        "cores": layout.mesh.num_cores,
        "batch": batch_section(built),
        "logical_cores": logical_cores(built, timing),
        "placement": placement_section(built),
        "context": built.plan.reasons.get("context", ""),
        "pipeline": pipeline_section(built),
        "neffs": len(built.programs),
        "findings": [f.as_dict() for f in findings(built, service)],
        "units": [dataclasses.asdict(row) for row in service.rows],
        "programs": program_rows(built, neff_bytes),
        "memory": memory_section(built),
        "timing": timing_section(built, timing, timings.band, confidence(about)),
        **fault_section(built, timings),
        "functions": function_rows(timings.parts, built.programs),
        "step_chart": step_chart(timings.parts),
        "timelines": timelines(timings.parts, built.programs),
        "collectives": collective_rows(timing, built.plan.mesh),
        "streams": stream_section(built, timing),
        **({"goodput": goodput} if goodput else {"inference": inference_section(built, timing)}),
        "limits": limits_section(
            about,
            timing.profile,
            assumed(built.job.goodput) if goodput else {},
            any(use.call.is_transfer for use in timing.collectives),
        ),
    }
    return bought(report | {"bottleneck": bottleneck(report)}, built.job, layout.target)


def pipeline_section(built: Built) -> Facts:
    """How the model is shared out over stages; empty without a pipeline."""
    parts, stages = built.plan.parts, len(built.plan.step.schedules)
    if not parts:
        return {}
    count = built.layout.num_microbatches
    return {
        "schedule": built.job.strategy.schedule,
        "balance": built.job.strategy.stage_balance,
        "num_microbatches": count,
        "bubble_of_equal_stages": bubble(stages, len(parts), count),
        "stages": by_stage(parts, stages),
    }


def provenance(stages: Stages) -> Facts:
    """Versions, and where the time of the tool itself went."""
    packages = ("jax", "jaxlib", "numpy", "ray", "optax", "msgpack", "zstandard")
    return {
        "compiler_version": compiler_version(),
        "python": ".".join(str(n) for n in sys.version_info[:3]),
        "packages": {name: metadata.version(name) for name in packages},
        "stages_s": {name: round(seconds, 3) for name, seconds in stages.seconds.items()},
    }


def graph_section(built: Built) -> Facts:
    """Size of the captured step; `params` are the model's, `trained` those that are not frozen,
    `flops_per_step` counts every op of the graph, recomputation included, `product_types` shares
    out those of contractions, in the types that the precision policy gives them; `told` is how a
    step of the user's was found to be called and to answer.
    """
    weights = [(b.role, b.global_type) for b in built.plan.step.buffers.values()]
    if model := built.model:
        pairs = zip(model.inputs, model.graph.inputs, strict=True)
        weights = [(slot.role, value.type) for slot, value in pairs]
    counted = {r: sum(t.num_elements for role, t in weights if role == r) for r in PARAMETER_ROLES}
    return {
        "name": built.name,
        "ops": count_ops(built.graph),
        "repeats": list(built.repeats),
        "told": list(built.told),
        "params": sum(counted.values()),
        "trained": counted["parameter"],
        "roles": role_rows(built.plan.step.buffers.values()),
        "flops_per_step": built.flops_per_step,
        "product_types": product_types(built.prepared.recipe.graph),
    }


def batch_section(built: Built) -> dict[str, int]:
    """Samples of a step, and how they come to the cores."""
    layout, micro_batch = built.layout, built.job.strategy.micro_batch
    if not built.mode.trains:  # which adds nothing up over parts of a batch
        micro_batch = layout.global_batch // layout.mesh.size(DATA_AXES)
    return {
        "global_batch": layout.global_batch,
        "micro_batch": micro_batch,
        "num_microbatches": built.layout.num_microbatches,
        "tokens_per_sample": built.tokens_per_sample,
    }


def logical_cores(built: Built, timing: StepTiming) -> Facts:
    """What a core of this report is, and how its physical cores share the work: kernels that both
    compute, kernels that one computes alone, and the time of those in a step.
    """
    target = built.layout.target
    functions = [f for program in built.programs.values() for f in program.functions]
    return {
        "lnc": target.lnc,
        "per_instance": target.cores,
        "hbm_bytes": target.hbm_bytes_per_core,
        "hypothetical": target.is_hypothetical,
        "kernels_cut": sum(f.num_kernels("compute") for f in functions),
        "kernels_alone": sum(f.num_kernels("idle") for f in functions),
        "alone_ps": timing.lone_ps,
    }


def placement_section(built: Built) -> Facts:
    """Which cores the axes of the mesh lie on, and why."""
    mesh, layout = built.plan.mesh, built.layout
    placed = place_mesh(built.placement, mesh.sizes, layout.topology)
    axes = [axis for axis, size in layout.mesh.axes if size > 1]
    return {
        "name": built.job.cluster.placement,
        "kind": placed.kind,
        "order": list(dict.fromkeys(mesh.origin(axis) for axis in placed.order)),
        "why": placed.why,
        "axes": {axis: where(placed, mesh.sizes, mesh.atoms(axis)) for axis in axes},
    }


def program_rows(built: Built, neff_bytes: Mapping[str, int]) -> list[Facts]:
    """One row per NEFF."""
    stages = {p.name: p.stage for p in built.plan.step.programs}
    return [
        {
            "name": name,
            "stage": stages[name],
            "functions": [f.name for f in program.functions],
            "instructions_static": sum(_instructions(f, False) for f in program.functions),
            "instructions_dynamic": _dynamic(program, program.steps),
            "neff_bytes": neff_bytes.get(name, 0),
        }
        for name, program in built.programs.items()
    ]


def _instructions(function: Function, unrolled: bool) -> int:
    return sum(count_instructions(k.body, unrolled) for s in function.subgraphs for k in s)


def _dynamic(program: Program, steps: Sequence[Call | Repeat]) -> int:
    return sum(
        step.trip * _dynamic(program, step.steps)
        if isinstance(step, Repeat)
        else _instructions(program.functions[step.function], unrolled=True)
        for step in steps
    )


def findings(built: Built, service: UnitService) -> list[Diagnostic]:
    """What the user should know: broken budgets, what the recipe did not predict, the cache."""
    target = built.layout.target
    integers = downcasts(built.graph, built.job.compiler, target.core.generation)
    machine = [
        Diagnostic("SW_HYPOTHETICAL", hypothetical_text(target), severity="warning")
        for _ in range(target.is_hypothetical)
    ]
    plan = (*built.findings, *built.plan.findings, *_idle_stages(built), *_late_ranks(built))
    return [*machine, *budget_findings(built), *integers, *plan, *service.findings]


def _idle_stages(built: Built) -> Iterator[Diagnostic]:
    """A note when there are too few micro-batches to fill a pipeline, with what more would do."""
    parts, stages, layout = built.plan.parts, len(built.plan.step.schedules), built.layout
    count = layout.num_microbatches
    if not parts or count >= FEW_MICROBATCHES * stages:
        return
    fuller = [n * stages for n in (2, 4, 8)]
    waits = {n: share_text(bubble(stages, len(parts), n)) for n in (count, *fuller)}
    more = ", ".join(f"{n * layout.captured_batch} for {waits[n]}" for n in fuller)
    plural = "micro-batch keeps" if count == 1 else "micro-batches keep"
    yield Diagnostic(
        "SW_PIPELINE_BUBBLE",
        f"{count} {plural} {stages} stages waiting for each other {waits[count]} of the step",
        hint=f"set strategy.global_batch: {more}",
        severity="note",
    )


def _late_ranks(built: Built) -> Iterator[Diagnostic]:
    """The warnings of cores that wait for others to be loaded, which is no failure."""
    late = built.layout.faults.late_cores
    for after_s, cores in waiting(late):
        yield Diagnostic(
            "SW_LATE_RANK",
            f"after {after_s:.0f} s all others still wait for core {ranges(cores)} to connect",
            None,
            f"the step begins after {max(late.values()):g} s; a rank that is late usually compiles:"
            " precompile, or share a cache",
            severity="warning",
        )


def timing_section(
    built: Built, timing: StepTiming, timings: Mapping[str, StepTiming], trust: Confidence
) -> Facts:
    """Step time, band, breakdown, rates.

    MFU divides by the published bf16 peak of the cores.
    """
    seconds = timing.step_time_ps / PS_PER_S
    layout = built.layout
    peak = layout.target.published_flops_per_s_per_core * layout.mesh.num_cores
    tokens = layout.global_batch * built.tokens_per_sample
    counted = step_flops(built)
    found = counted.rates(seconds, peak)
    published = None
    if built.mode.trains:
        published = published_section(layout.target, counted.attention, found["mfu"])
    times = [t.step_time_ps / PS_PER_S for t in timings.values()]
    return {
        "profile": timing.profile,
        "confidence": trust.text,
        "confidence_why": trust.why,
        "step_time_ps": timing.step_time_ps,
        "step_time_s": seconds,
        "band_s": band(times, seconds, published, trust),
        "breakdown_ps": dict(timing.breakdown_ps),
        "hidden_ps": dict(timing.hidden_ps),
        "peak_flops_per_s": peak,
        **found,
        "published": published,
        "tokens_per_s": tokens / seconds,
        "engines": {
            name: {"busy_ps": ps, "share": ps / timing.step_time_ps / layout.target.lnc}
            for name, ps in timing.engines_ps.items()
        },
        "per_stage": [
            {"stage": n, "step_time_ps": timing.step_time_ps, "breakdown_ps": dict(parts)}
            for n, parts in enumerate(timing.stages_ps)
        ],
        "collective_profile": timing.profile,
    }


def published_section(target: Target, attention: str, mfu: float) -> Facts | None:
    """The best published run of a machine and a kind of model, and how many times its MFU ours is;
    None where none is in the set."""
    best = best_run(target, attention)
    if best is None:
        return None
    theirs = best.mfu(target.published_flops_per_s_per_core)
    told = {key: getattr(best, key) for key in ("id", "model", "cores", "release", "source")}
    return {"mfu": theirs, "times": mfu / theirs, **told, "machines": list(best.machines)}


def band(
    times: Sequence[float], seconds: float, published: Facts | None, trust: Confidence
) -> list[float]:
    """The fastest and the slowest step over all profiles; of a kind that nobody has published, down
    to the best MFU that somebody has."""
    slowest = max(times)
    if published is not None and trust.text == EXTRAPOLATED:
        slowest = max(slowest, seconds * published["times"])
    return [min(times), slowest]


def fault_section(built: Built, timings: Timings) -> Facts:
    """What the faults of the cluster cost; nothing for a healthy one."""
    if timings.healthy is None:
        return {}
    healthy, step = timings.healthy.step_time_ps, timings.chosen.step_time_ps
    return {
        "faults": {
            **dataclasses.asdict(built.job.faults),
            "healthy_step_time_ps": healthy,
            "slowdown": step / healthy,
            "rank_classes": timings.chosen.rank_classes,
        }
    }


def collective_rows(timing: StepTiming, mesh: Mesh) -> list[dict[str, Any]]:
    """Collectives of the step by kind, axes and size."""
    return [
        {
            "kind": use.call.kind,
            "axis": "host" if use.call.is_transfer else mesh.shown(use.call.axes),
            "group_size": use.cost.group_size,
            "count": use.count,
            "parts": max(1, len(use.call.parts)),
            "stream": None if use.call.is_transfer else use.call.stream,
            "bytes": use.cost.size_bytes,
            "algorithm": use.cost.algorithm,
            "time_ps": use.total_ps,
            "exposed_ps": use.exposed_ps,
            "why": use.cost.why,
        }
        for use in timing.collectives
    ]


def stream_section(built: Built, timing: StepTiming) -> Facts:
    """What runs on each stream of a core, and in which DMA packets it and compute move."""
    packets, mesh = built.layout.packets, built.plan.mesh
    rows = []
    engines = [use for use in timing.collectives if not use.call.is_transfer]
    for stream in sorted({use.call.stream for use in engines}):
        uses = [use for use in engines if use.call.stream == stream]
        kinds = {f"{use.call.kind} {mesh.shown(use.call.axes)}": None for use in uses}
        rows.append(
            {
                "stream": stream,
                "packet_bytes": packets.of(stream),
                "collectives": list(kinds),
                "count": sum(use.count for use in uses),
                "time_ps": sum(use.total_ps for use in uses),
                "exposed_ps": sum(use.exposed_ps for use in uses),
            }
        )
    return {"compute_packet_bytes": packets.compute_bytes, "streams": rows}
