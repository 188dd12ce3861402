"""A published run through the road of any job: capture, import, recipe, partition, compile, link,
and the cluster loop on the run's own mesh.

Runs that differ in nothing that decides their time share one prediction. Predictions are stored
beside units, by what they depend on, so that a repeated `validate` builds nothing.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compiler.machine.target import PS_PER_S, load_target
from shardwright.compiler.support.fields import check_fields
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.config.config import TABLES, JobConfig
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.road.build import Built, build_task
from shardwright.orchestrator.road.plan_cache import stored
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import Host, Question, answers, step_of, with_host
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.service.units import PACKAGES, digest, source_digest
from shardwright.orchestrator.validation.published import Workload
from shardwright.orchestrator.validation.recipes import tables_of
from shardwright.orchestrator.validation.tasks import task_of
from shardwright.sim_cluster.calibration import constants
from shardwright.sim_cluster.profiles import STALL_RECOVERY, STREAMING, Profile
from shardwright.sim_cluster.timing.step_time import StepTiming

KIND = "prediction"
IN_PROFILE = (STREAMING, STALL_RECOVERY)


@dataclass(frozen=True, slots=True)
class Timed:
    """A predicted step: seconds, what they are spent on, and how busy engines are in them."""

    seconds: float
    shares: Mapping[str, float]
    busy: Mapping[str, float]


class Predictor:
    """Times workloads under profiles; builds one only when an answer is not stored."""

    def __init__(self, service: UnitService, cache: Cache) -> None:
        self._service = service
        self._cache = cache
        self.asked, self.stored_s = 0, list[float]()  # Unix times of answers that others stored
        self._began_s = time.time()
        self._built: tuple[Workload, Built] | None = None  # the last one: programs are large

    def time(self, workload: Workload, profile: Profile) -> Timed:
        """The step of `workload`. Raises the DiagnosticError of the stage that refuses it."""
        key = _key(workload, profile)
        self.asked += 1
        known = self._stored(key)
        self._cache.tally.count(KIND, hit=known is not None)
        if known is not None:
            return known
        built = self._programs(workload)
        asked = Question(
            name=f"step {profile.name}",
            step=step_of(built, built.programs),
            profile=profile.name,
            credit=profile,
        )
        (answer,) = answers([asked], self._service)
        timed = shares_of(with_host(answer.timing, Host(workload.host_us)))
        self._cache.put(KIND, key, json.dumps(dataclasses.asdict(timed)).encode())
        return timed

    def _stored(self, key: str) -> Timed | None:
        """What an entry holds."""
        found, stored_s = stored(self._cache, KIND, key, lambda row: check_fields(Timed(**row)))
        if found is None:
            return None
        if stored_s < self._began_s:
            self.stored_s.append(stored_s)
        return Timed(**found)

    def _programs(self, workload: Workload) -> Built:
        if self._built is None or self._built[0] != workload:
            self._built = None
            self._built = (workload, build_workload(workload, self._service))
        return self._built[1]


def _key(workload: Workload, profile: Profile) -> str:
    """Digest of what a prediction depends on: of the fitted constants those that are not in
    `profile`, so that another fit leaves what was predicted for it."""
    others = {n: dataclasses.asdict(c) for n, c in constants().items() if n not in IN_PROFILE}
    parts = [dataclasses.asdict(workload), dataclasses.asdict(profile), others]
    sources = source_digest(PACKAGES, (".py", ".json")).encode()
    return digest(
        [json.dumps(parts).encode(), sources, load_target(workload.target).digest.encode()]
    )


def shares_of(timing: StepTiming) -> Timed:
    """The seconds of a step, what they are spent on, and how busy engines are in them."""
    total = timing.step_time_ps
    shares, busy = (
        {name: ps / total for name, ps in parts.items() if ps}
        for parts in (timing.breakdown_ps, timing.engines_ps)
    )
    return Timed(total / PS_PER_S, shares, busy)


def build_workload(workload: Workload, service: UnitService) -> Built:
    """The linked programs of a run, on its own mesh and machines."""
    job = job_of(workload)
    return build_task(job, layout_of(job), task_of(workload), service, Stages())


def job_of(w: Workload) -> JobConfig:
    """The run as a job: machine, mesh, batches, strategy, compiler."""
    return JobConfig(**{name: TABLES[name](**keys) for name, keys in tables_of(w).items()})
