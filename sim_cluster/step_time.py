"""Time of one training step of a bundle: breakdown, exposed collectives, engines, the band over
profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compiler.isa.program import CollectiveCall, Program
from compiler.target import Target
from sim_cluster.classes import RankClasses, refine
from sim_cluster.macro import MacroOp, Start, Stretch, schedule_macros
from sim_cluster.network import Network
from sim_cluster.profiles import PROFILES, under_profile
from sim_cluster.run_timing import ClassResult, ClusterLoop, CollectiveUse

CATEGORIES = ("compute", "memory", "bubble", "launch", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is timed: programs by name, mesh, schedule, where."""

    programs: Mapping[str, Program]
    schedule: tuple[tuple[tuple[str, ...], int], ...]
    mesh: Mapping[str, int]
    target: Target
    instances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """One step under one profile.

    `breakdown_ps` sums to `step_time_ps` exactly.
    """

    profile: str
    step_time_ps: int
    breakdown_ps: Mapping[str, int]
    hidden_ps: Mapping[str, int]
    engines_ps: Mapping[str, int]  # summed over the physical cores of a logical one
    lone_ps: int  # one physical core of a logical one works, the other has no part in it
    collectives: tuple[CollectiveUse, ...]
    results: Sequence[ClassResult] = field(repr=False)
    classes: RankClasses = field(repr=False)


def time_step(step: Step, profile: str = "nominal") -> StepTiming:
    """Time one step: every function once, then the cluster loop over the classes of ranks."""
    target = under_profile(step.target, profile)
    macros = schedule_macros(step.programs, step.schedule, target)
    network = Network(target, step.instances, step.mesh, profile)
    axes = sorted({op.call.axes for op in macros if isinstance(op, Start)})
    ranks = 1
    for size in step.mesh.values():
        ranks *= size
    classes = refine(step.mesh, axes, [0] * ranks)
    loop = ClusterLoop(classes, [macros] * classes.count, network.duration)
    results = loop.run()
    return _timing(profile, results, classes, macros)


def band(step: Step) -> dict[str, StepTiming]:
    """The step under every profile."""
    return {name: time_step(step, name) for name in PROFILES}


def _timing(
    profile: str,
    results: Sequence[ClassResult],
    classes: RankClasses,
    macros: Sequence[MacroOp],
) -> StepTiming:
    last = max(results, key=lambda r: r.end_ps)
    breakdown = dict.fromkeys(CATEGORIES, 0)
    breakdown.update(last.charged_ps)
    breakdown["idle"] += last.end_ps - sum(breakdown.values())
    engines: dict[str, int] = {}
    segments = [op.segment for op in macros if isinstance(op, Stretch)]
    for segment in segments:
        for engine, ps in segment.busy_ps.items():
            engines[engine] = engines.get(engine, 0) + ps
    uses = tuple(sorted(last.uses.values(), key=lambda u: -u.total_ps))
    hidden: dict[str, int] = {}
    for use in uses:
        name = axis_category(use.call)
        hidden[name] = hidden.get(name, 0) + use.total_ps - use.exposed_ps
    return StepTiming(
        profile=profile,
        step_time_ps=last.end_ps,
        breakdown_ps=breakdown,
        hidden_ps=hidden,
        engines_ps=engines,
        lone_ps=sum(segment.lone_ps for segment in segments),
        collectives=uses,
        results=results,
        classes=classes,
    )


def axis_category(call: CollectiveCall) -> str:
    """The breakdown category of a collective."""
    return "collective_" + "_".join(call.axes)
