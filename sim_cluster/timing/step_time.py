"""Time of one training step of a bundle under a profile: breakdown, collectives, engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.collectives.ops import TORUS
from shardwright.collectives.timing.runtimes import CURRENT, runtime_named
from shardwright.compiler.isa.program import CollectiveCall, Program
from shardwright.compiler.machine.target import Target
from shardwright.compiler.neff.schedule import STAGE_AXIS, Schedule, Transfer
from shardwright.sim_cluster.network.network import Network
from shardwright.sim_cluster.profiles import PROFILES, Profile, credited
from shardwright.sim_cluster.timing.actors import ClassResult, CollectiveDuration, CollectiveUse
from shardwright.sim_cluster.timing.classes import RankClasses, refine
from shardwright.sim_cluster.timing.contention import DEFAULT_PACKETS, Packets
from shardwright.sim_cluster.timing.degraded import Pattern, pattern_of
from shardwright.sim_cluster.timing.faults import NO_FAULTS, Faults, Health, check_faults
from shardwright.sim_cluster.timing.macro import (
    Evaluate,
    MacroOp,
    Start,
    evaluated,
    program_macros,
    schedule_macros,
)
from shardwright.sim_cluster.timing.run_timing import ClusterLoop, axis_category
from shardwright.sim_cluster.timing.steady import Repeats

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
    collectives: Mapping[str, Any] = field(default_factory=dict)  # replace `CollectiveCosts`
    whole_axes: Mapping[str, str] = field(default_factory=dict)  # of parts of axes, for names
    faults: Faults = NO_FAULTS
    runtime: str = CURRENT.name  # see `collectives/timing/runtimes.py`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """One step under one profile, in plain data.

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
    rank_classes: int  # classes of ranks that behave alike
    lnc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed(StepTiming):
    """A timed step with all that every class of ranks did."""

    results: Sequence[ClassResult] = field(repr=False)
    classes: RankClasses = field(repr=False)
    stage_of: tuple[int, ...] = field(repr=False)  # the pipeline stage of every class
    step: Step = field(repr=False)
    macros: Mapping[str, tuple[MacroOp, ...]] = field(repr=False)  # of the programs by name

    @property
    def last(self) -> ClassResult:
        """The class that finishes last, whose time is that of the step."""
        return _last(self.results)

    def last_of(self, stage: int) -> ClassResult:
        """The class that finishes last of a pipeline stage."""
        return _last(_of_stage(self.results, self.stage_of, stage))


def _of_stage(
    results: Sequence[ClassResult], stages: Sequence[int], stage: int
) -> Iterator[ClassResult]:
    return (result for result, own in zip(results, stages, strict=True) if own == stage)


def _last(results: Iterable[ClassResult]) -> ClassResult:
    return max(results, key=lambda result: result.end_ps)


def time_step(
    step: Step,
    profile: str = "nominal",
    folded: bool = True,
    traced: bool = False,
    credit: Profile | None = None,
    evaluate: Evaluate = evaluated,
) -> Replayed:
    """Time one step: every function once, then the cluster loop over the classes of ranks, or
    (not `folded`) over every rank; micro-batches in their steady state once, unless `traced`.

    `credit` is what cores are credited with instead of what the profile says; the network's costs
    are always the profile's. `evaluate` times a function.
    Raises SimulationError (SW_DEAD_CORE, SW_TIME_DEADLOCK) when ranks hang, UsageError (SW_FAULT)
    for faults of cores, instances and links that are not there.
    """
    target = credited(step.target, credit or PROFILES[profile])
    runtime = runtime_named(step.runtime)
    settings = (step.placement, step.collectives, runtime)
    network = Network(step.target, step.instances, step.mesh, profile, *settings)
    macros = {n: program_macros(p, target, evaluate) for n, p in step.programs.items()}
    ranks = Ranks(step, network, target.cores_per_bank)
    axes_of = {n: {op.call.axes for op in m if isinstance(op, Start)} for n, m in macros.items()}
    met = set().union(*axes_of.values())
    if len(step.schedules) > 1:
        met.add((STAGE_AXIS,))  # messages tie the same cores of all stages
    classes = ranks.classes(sorted(met), folded)
    stages = [ranks.stage(classes.representative(c)) for c in range(classes.count)]
    by_stage = [
        schedule_macros(macros, schedule, step.transfers, stage)
        for stage, schedule in enumerate(step.schedules)
    ]
    whole = len(step.schedules) > 1 or not folded or traced or step.faults.jitter > 0
    results = ClusterLoop(
        classes,
        [by_stage[stage] for stage in stages],
        ranks.priced(classes),
        ranks.health(classes),
        stage_stride=ranks.stride,
        packets=step.packets,
        whole_axes=step.whole_axes,
        bank_cores=ranks.cores_per_bank,
        repeats=None if whole else Repeats.of(step.schedules[0], axes_of.__getitem__),
    ).run()
    return _replayed(profile, step, target.lnc, macros, classes, stages, results)


class Ranks:
    """The ranks of a step on their cores: what they run, what is wrong with them, with whom they
    share HBM."""

    def __init__(self, step: Step, network: Network, cores_per_bank: int) -> None:
        self.step, self.network = step, network
        self.count = math.prod(step.mesh.values())
        self.stride = self.count // len(step.schedules)
        self.cores: list[int] = network.placement.slots.tolist()
        self.cores_per_bank = cores_per_bank
        self.banks = [core // cores_per_bank for core in self.cores]
        self.patterns = {i: pattern_of(links) for i, links in step.faults.links.items()}
        check_faults(step.faults, self.count, step.instances)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.stride

    def pattern(self, rank: int) -> Pattern:
        """What is wrong with the links of the instance a rank is on."""
        return self.patterns.get(self.cores[rank] // self.network.topology.ranks_per_instance, ())

    def _colour(self, rank: int) -> Hashable:
        """What distinguishes a rank before it meets others."""
        core, faults = self.cores[rank], self.step.faults
        ends = core in faults.dead_cores, faults.hardware.get(core, "")
        own = faults.slow_cores.get(core, 1.0), *ends
        return self.stage(rank), own, self.pattern(rank)

    def classes(self, axes: Sequence[tuple[str, ...]], folded: bool) -> RankClasses:
        """Ranks that behave alike; each on its own when not `folded`."""
        colours = [self._colour(rank) if folded else rank for rank in range(self.count)]
        return refine(self.step.mesh, axes, colours, self.banks)

    def health(self, classes: RankClasses) -> Health:
        """What is wrong with classes."""
        faults = self.step.faults
        cores = [self.cores[classes.representative(c)] for c in range(classes.count)]
        return Health(
            slow={c: faults.slow_cores.get(core, 1.0) for c, core in enumerate(cores)},
            dead=frozenset(c for c, core in enumerate(cores) if core in faults.dead_cores),
            dead_cores=tuple(sorted(faults.dead_cores)),
            hardware=faults.hardware,
            failing={c: faults.hardware[r] for c, r in enumerate(cores) if r in faults.hardware},
            jitter=faults.jitter,
            seed=faults.seed,
        )

    def priced(
        self, classes: RankClasses
    ) -> Callable[[CollectiveCall, frozenset[int]], CollectiveDuration]:
        """Prices of collectives between classes."""
        patterns = [self.pattern(classes.representative(c)) for c in range(classes.count)]

        def duration(call: CollectiveCall, members: frozenset[int]) -> CollectiveDuration:
            return self.network.duration(call, [patterns[m] for m in members])

        return duration


def band(step: Step) -> dict[str, StepTiming]:
    """The step under every profile."""
    return {name: time_step(step, name) for name in PROFILES}


def _replayed(
    profile: str,
    step: Step,
    lnc: int,
    macros: Mapping[str, tuple[MacroOp, ...]],
    classes: RankClasses,
    stages: Sequence[int],
    results: Sequence[ClassResult],
) -> Replayed:
    last = _last(results)
    uses = tuple(sorted(last.uses.values(), key=lambda u: -u.total_ps))
    hidden: dict[str, int] = {}
    for use in uses:
        name = axis_category(use.call, step.whole_axes)
        hidden[name] = hidden.get(name, 0) + use.total_ps - use.exposed_ps
    by_stage = (_last(_of_stage(results, stages, stage)) for stage in range(max(stages) + 1))
    return Replayed(
        profile=profile,
        step_time_ps=last.end_ps,
        breakdown_ps=_breakdown(last, last.end_ps),
        hidden_ps=hidden,
        engines_ps=last.busy_ps,
        lone_ps=last.lone_ps,
        stages_ps=tuple(_breakdown(result, last.end_ps) for result in by_stage),
        collectives=uses,
        rank_classes=classes.count,
        results=results,
        classes=classes,
        stage_of=tuple(stages),
        step=step,
        macros=macros,
        lnc=lnc,
    )


def _breakdown(result: ClassResult, step_time_ps: int) -> dict[str, int]:
    """How the step of one class was spent; the end of the step is idle."""
    found = dict.fromkeys(CATEGORIES, 0) | result.charged_ps
    found["idle"] += step_time_ps - sum(found.values())
    return found
