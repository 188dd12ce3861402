"""The time of a step by `time` units: one per profile, and one without its faults.

An answer is stored under what was asked, so a step is timed once, whichever command or job asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.isa.program import Program
from shardwright.compiler.machine.target import PS_PER_US
from shardwright.orchestrator.road.build import Built
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.service.unit_errors import UnitFailedError
from shardwright.sim_cluster.profiles import PROFILES, Profile
from shardwright.sim_cluster.timing.faults import NO_FAULTS
from shardwright.sim_cluster.timing.step_parts import StepParts
from shardwright.sim_cluster.timing.step_time import Step, StepTiming
from shardwright.sim_cluster.timing.timing_unit import (
    Answer,
    decode_answer,
    encode_question,
    packed_programs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked about a step: `name` is for people, the rest as in `time_step`."""

    name: str
    step: Step
    profile: str
    credit: Profile | None = None
    traced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Answers about one step: under the profile that was asked for, under all of them, and, where
    it has faults, without them; `parts` is what the first is made of, `trace` its file, empty
    unless it was asked for."""

    chosen: StepTiming
    parts: StepParts
    band: Mapping[str, StepTiming]
    healthy: StepTiming | None = None
    trace: bytes = b""


def step_of(built: Built, programs: Mapping[str, Program]) -> Step:
    """What is timed of a job."""
    cluster, layout = built.job.cluster, built.layout
    return Step(
        programs=programs,
        schedules=built.plan.step.schedules,
        transfers=built.plan.step.transfers,
        mesh=built.plan.step.mesh,
        target=layout.target,
        instances=cluster.instances,
        placement=built.placement,
        packets=layout.packets,
        collectives=layout.collectives,
        whole_axes={name: built.plan.mesh.origin(name) for name in built.plan.mesh.names},
        runtime=cluster.runtime,
        faults=layout.faults,
    )


def time_programs(
    built: Built, programs: Mapping[str, Program], service: UnitService, traced: bool = False
) -> Timings:
    """The step under every profile, and without its faults; with a trace when `traced`. Raises
    SimulationError (SW_DEAD_CORE) when ranks wait for a dead core."""
    cluster = built.job.cluster
    host = Host(cluster.host_us, cluster.inflight_requests)
    return timed(step_of(built, programs), cluster.profile, service, traced, host)


@dataclass(frozen=True, slots=True)
class Host:
    """What the host takes for a step, in microseconds, and how many executions it may queue ahead:
    with any, cores wait only for what a step does not cover."""

    us: int = 0
    ahead: int = 0

    def waited_ps(self, step_ps: int) -> int:
        """How long cores wait for it in a step of that time."""
        return max(0, self.us * PS_PER_US - (step_ps if self.ahead else 0))


NO_HOST = Host()


def timed(
    step: Step,
    profile: str,
    service: UnitService,
    traced: bool = False,
    host: Host = NO_HOST,
) -> Timings:
    """All that a report says of the time of a step, in which cores wait for the `host`. Raises what
    `time_step` raises."""
    asked = [
        Question(name=f"step {n}", step=step, profile=n, traced=traced and n == profile)
        for n in PROFILES
    ]
    if step.faults:
        healthy = replace(step, faults=NO_FAULTS)
        asked.append(Question(name=f"step {profile} healthy", step=healthy, profile=profile))
    found = answers(asked, service)
    timings = [with_host(answer.timing, host) for answer in found]
    band = dict(zip(PROFILES, timings, strict=False))
    first = found[list(PROFILES).index(profile)]
    return Timings(
        chosen=band[profile],
        parts=first.parts,
        band=band,
        healthy=timings[-1] if step.faults else None,
        trace=first.trace,
    )


def with_host(timing: StepTiming, host: Host) -> StepTiming:
    """A step, and before it the time in which cores wait for the host."""
    host_ps = host.waited_ps(timing.step_time_ps)
    if not host_ps:
        return timing
    return replace(
        timing,
        step_time_ps=timing.step_time_ps + host_ps,
        breakdown_ps={**timing.breakdown_ps, "host": host_ps},
        stages_ps=tuple({**parts, "host": host_ps} for parts in timing.stages_ps),
    )


def answers(asked: Sequence[Question], service: UnitService) -> list[Answer]:
    """The answers to questions, in their order, from the service. Raises what `time_step` raises
    for the first that has none."""
    # Questions about a step differ in who is credited with what, not in its programs.
    distinct = {id(q.step.programs): q.step.programs for q in asked}
    programs = {number: packed_programs(found) for number, found in distinct.items()}
    units = []
    for q in asked:
        packed = programs[id(q.step.programs)]
        payload = encode_question(q.step, q.profile, q.credit, q.traced, packed)
        units.append(WorkUnit.of("time", q.name, payload))
    try:
        results = service.run(units)
    except UnitFailedError as failed:
        raise failed.error from failed
    return [decode_answer(results[unit.key]) for unit in units]
