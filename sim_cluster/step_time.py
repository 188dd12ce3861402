"""Time of one training step of a bundle: breakdown, exposed collectives, engines, the band over
profiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from collectives.placement import TORUS
from compiler.isa.program import Program
from compiler.neff.schedule import STAGE_AXIS, Schedule, Transfer
from compiler.target import Target
from sim_cluster.classes import RankClasses, refine
from sim_cluster.contention import DEFAULT_PACKETS, Packets
from sim_cluster.macro import MacroOp, Start, Stretch, program_macros, schedule_macros
from sim_cluster.network import Network
from sim_cluster.profiles import PROFILES, under_profile
from sim_cluster.run_timing import ClassResult, ClusterLoop, CollectiveUse, axis_category

CATEGORIES = ("compute", "memory", "bubble", "launch", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is timed: programs by name, mesh, schedule, where."""

    programs: Mapping[str, Program]
    schedules: tuple[Schedule, ...]  # per pipeline stage
    mesh: Mapping[str, int]
    target: Target
    instances: int
    transfers: tuple[Transfer, ...] = ()
    placement: str = TORUS
    packets: Packets = DEFAULT_PACKETS
    whole_axes: Mapping[str, str] = field(default_factory=dict)  # of parts of axes, for names


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """One step under one profile.

    `breakdown_ps` sums to `step_time_ps` exactly; so does every entry of `stages_ps`, that of the
    last-finishing cores of each pipeline stage.
    """

    profile: str
    step_time_ps: int
    breakdown_ps: Mapping[str, int]
    hidden_ps: Mapping[str, int]
    engines_ps: Mapping[str, int]  # summed over the physical cores of a logical one
    lone_ps: int  # one physical core of a logical one works, the other has no part in it
    stages_ps: tuple[Mapping[str, int], ...]
    collectives: tuple[CollectiveUse, ...]
    results: Sequence[ClassResult] = field(repr=False)
    classes: RankClasses = field(repr=False)


def time_step(step: Step, profile: str = "nominal") -> StepTiming:
    """Time one step: every function once, then the cluster loop over the classes of ranks."""
    target = under_profile(step.target, profile)
    programs = {name: program_macros(p, target) for name, p in step.programs.items()}
    by_stage = [
        schedule_macros(programs, schedule, step.transfers, stage)
        for stage, schedule in enumerate(step.schedules)
    ]
    network = Network(step.target, step.instances, step.mesh, profile, step.placement)
    started = {op.call.axes for macros in by_stage for op in macros if isinstance(op, Start)}
    if len(by_stage) > 1:
        started.add((STAGE_AXIS,))  # messages tie the same cores of all stages
    ranks = math.prod(step.mesh.values())
    stride = ranks // len(by_stage)
    classes = refine(step.mesh, sorted(started), [rank // stride for rank in range(ranks)])
    stages = [classes.representative(c) // stride for c in range(classes.count)]
    macros = [by_stage[stage] for stage in stages]
    loop = ClusterLoop(
        classes,
        macros,
        network.duration,
        stage_stride=stride,
        packets=step.packets,
        whole_axes=step.whole_axes,
    )
    return _timing(profile, loop.run(), classes, macros, stages, step.whole_axes)


def band(step: Step) -> dict[str, StepTiming]:
    """The step under every profile."""
    return {name: time_step(step, name) for name in PROFILES}


def _timing(
    profile: str,
    results: Sequence[ClassResult],
    classes: RankClasses,
    macros: Sequence[Sequence[MacroOp]],
    stages: Sequence[int],
    whole_axes: Mapping[str, str],
) -> StepTiming:
    number = max(range(len(results)), key=lambda n: results[n].end_ps)
    last = results[number]
    engines: dict[str, int] = {}
    segments = [op.segment for op in macros[number] if isinstance(op, Stretch)]
    for segment in segments:
        for engine, ps in segment.busy_ps.items():
            engines[engine] = engines.get(engine, 0) + ps
    uses = tuple(sorted(last.uses.values(), key=lambda u: -u.total_ps))
    hidden: dict[str, int] = {}
    for use in uses:
        name = axis_category(use.call, whole_axes)
        hidden[name] = hidden.get(name, 0) + use.total_ps - use.exposed_ps
    return StepTiming(
        profile=profile,
        step_time_ps=last.end_ps,
        breakdown_ps=_breakdown(last, last.end_ps),
        hidden_ps=hidden,
        engines_ps=engines,
        lone_ps=sum(segment.lone_ps for segment in segments),
        stages_ps=tuple(_of_stages(results, stages, last.end_ps)),
        collectives=uses,
        results=results,
        classes=classes,
    )


def _breakdown(result: ClassResult, step_time_ps: int) -> dict[str, int]:
    """How the step of one class was spent; the end of the step is idle."""
    found = dict.fromkeys(CATEGORIES, 0) | result.charged_ps
    found["idle"] += step_time_ps - sum(found.values())
    return found


def _of_stages(
    results: Sequence[ClassResult], stages: Sequence[int], step_time_ps: int
) -> Iterator[dict[str, int]]:
    """The breakdown of the last-finishing class of every stage."""
    for stage in range(max(stages) + 1):
        own = [r for r, s in zip(results, stages, strict=True) if s == stage]
        yield _breakdown(max(own, key=lambda r: r.end_ps), step_time_ps)
