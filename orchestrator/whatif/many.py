"""Plans of many jobs at a time: their units share one executor and one cache, so that workers stay
busy and a distinct unit is computed once, and their captures are shared.

Each job goes its road on a thread. Python code runs on one thread at a time, so what keeps several
processors busy are units; threads only see to it that there always are some.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

from shardwright.compiler.diagnostics import DiagnosticError, InternalError
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.host import num_cpus
from shardwright.orchestrator.report.text import Report
from shardwright.orchestrator.road.plan_cache import NOT_IN_KEY, Shared, plan
from shardwright.orchestrator.road.stages import Traces
from shardwright.orchestrator.road.units import executor_of
from shardwright.orchestrator.service.events import EventLog
from shardwright.orchestrator.service.shared import SharedExecutor
from shardwright.orchestrator.terminal.terminal import say

TURN_S = 0.05
"""How often jobs that have ended are looked for (our choice; a job takes seconds)."""


def plans(
    jobs: Mapping[str, JobConfig], host: JobConfig
) -> Generator[tuple[str, Future[Report]], None, None]:
    """The report of every job, or what it raised, as they come; `host` says where units run and
    are logged. Closing the iterator ends what runs."""
    events = EventLog(host.output.events)
    shared = SharedExecutor(executor_of(host, many=True), events)
    # Jobs at a time: one per worker, and one that is being captured or linked meanwhile.
    in_flight = (host.run.workers or num_cpus()) + 1
    with closing(events), closing(shared), ThreadPoolExecutor(in_flight) as threads:
        shared.start()
        on_host = {name: getattr(host, name) for name in NOT_IN_KEY if name != "base"}
        one: Callable[[JobConfig], Report] = partial(plan, shared=Shared(shared.lease, Traces()))
        futures = {threads.submit(one, replace(job, **on_host)): key for key, job in jobs.items()}
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


def refusal(answer: Future[Report]) -> DiagnosticError | None:
    """What a job was refused with; a defect of ours as an InternalError, whose trace is told here.
    None of a job that has its report."""
    error = answer.exception()
    if error is None or isinstance(error, DiagnosticError):
        return error
    made = InternalError.of(error, "".join(traceback.format_exception(error)))
    say("\n".join(made.__notes__), err=True)
    return made
