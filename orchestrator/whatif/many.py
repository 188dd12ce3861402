"""Plans of many jobs at a time: their units share one executor and one cache, so that workers stay
busy and a distinct unit is computed once, and their captures are shared.

Each job goes its road on a thread. Python code runs on one thread at a time, so what keeps several
processors busy are units; threads only see to it that there always are some.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.host import num_cpus
from shardwright.orchestrator.road.plan_cache import NOT_IN_KEY, Shared, plan
from shardwright.orchestrator.road.stages import Traces
from shardwright.orchestrator.road.units import executor_of
from shardwright.orchestrator.service.events import EventLog
from shardwright.orchestrator.service.shared import SharedExecutor

Report = Mapping[str, Any]
TURN_S = 0.05
"""How often jobs that have ended are looked for (our choice; a job takes seconds)."""


def plans(
    jobs: Mapping[str, JobConfig], host: JobConfig
) -> Generator[tuple[str, Future[Report]], None, None]:
    """The report of every job, or what it raised, as they come; `host` says where units run and
    are logged. Closing the iterator ends what runs."""
    events = EventLog(Path(host.output.events) if host.output.events else None)
    shared = SharedExecutor(executor_of(host, many=True), events)
    with closing(events), closing(shared), ThreadPoolExecutor(_in_flight(host)) as threads:
        shared.start()
        share = Shared(shared.lease, Traces())
        futures = {threads.submit(_plan, _on(host, job), share): key for key, job in jobs.items()}
        try:
            while futures:
                shared.turn(TURN_S)
                for future in [future for future in futures if future.done()]:
                    yield futures.pop(future), future
        finally:
            for future in futures:
                future.cancel()
            if futures:
                shared.cancel()


def _in_flight(host: JobConfig) -> int:
    """Jobs at a time: one per worker, and one that is being captured or linked meanwhile."""
    return (host.run.workers or num_cpus()) + 1


def _on(host: JobConfig, job: JobConfig) -> JobConfig:
    own = {name: getattr(host, name) for name in NOT_IN_KEY if name != "base"}
    return replace(job, **own)


def _plan(job: JobConfig, share: Shared) -> Report:
    return plan(job, shared=share)
