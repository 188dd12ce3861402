"""Who computes the units of a job: its executor, its cache, its log."""

from __future__ import annotations

from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.config.config import CacheConfig, JobConfig
from shardwright.orchestrator.host import executor_kind, num_cpus
from shardwright.orchestrator.road.usage import check_executor
from shardwright.orchestrator.service.events import EventLog
from shardwright.orchestrator.service.executor import Executor, InlineExecutor, Limits, Start
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.service.service import UnitService

GIB = 2**30


def unit_service(
    job: JobConfig, progress: Progress | None, executor: Start | None = None
) -> UnitService:
    """The unit service of a job: its executor (its own, started when first needed, unless one is
    given), its cache, its log."""
    events = EventLog(job.output.events)
    note, left = (progress.unit, progress.left_to_others) if progress else (None, None)
    start, cache = executor or executor_of(job), open_cache(job.cache)
    return UnitService(start, cache, note, events, left, refused_kinds(job.cache))


def refused_kinds(cache: CacheConfig) -> tuple[str, ...]:
    """Kinds of units that are not computed where the cache does not have them."""
    return ("compile",) if cache.miss == "refuse" else ()


def executor_of(job: JobConfig, many: bool = False) -> Start:
    """How to start the job's executor; `many`: for more units than its own. Raises UsageError for a
    time limit where nothing can end a unit."""
    run = job.run
    limits = Limits(run.unit_timeout_s, int(run.unit_memory_gib * GIB))
    check_executor(run)

    def start() -> Executor:
        from shardwright.orchestrator.service import process_backend

        match executor_kind(run.executor):
            case "ray":
                from shardwright.orchestrator.service.ray_backend import RayExecutor

                return RayExecutor(run.workers, limits)
            case "process":
                return process_backend.ProcessExecutor(run.workers, limits)
            case "auto" if (run.workers or num_cpus()) > 1 or limits.timeout_s:
                kind = process_backend.ProcessExecutor if many else process_backend.AutoExecutor
                return kind(run.workers, limits)
            case _:
                return InlineExecutor(limits)

    return start
