"""`plan`: the road without values, and the cache that answers a repeated question without jax.

The plan key covers the resolved job, the user's model files and our sources, so an edited model is
never answered from a stale plan. A hit reads one JSON document.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.target import load_target
from orchestrator.cache import Cache, default_directory
from orchestrator.config import JobConfig
from orchestrator.model import source_files
from orchestrator.units import PACKAGES, digest, source_digest

if TYPE_CHECKING:
    from orchestrator.progress import Progress

_NOT_IN_KEY = ("output", "cache", "run", "base")


def plan(
    job: JobConfig, trace: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """The report of a job without values, from the plan cache when nothing it depends on has
    changed; never when a `trace` is wanted, which the cache does not hold."""
    start = time.perf_counter()
    cache = Cache(default_directory(job.cache.dir))
    key = plan_key(job)
    stored = cache.get("plan", key) if trace is None else None
    if stored is not None:
        report: dict[str, Any] = json.loads(stored)
        report["provenance"]["stages_s"] = {"cached plan": round(time.perf_counter() - start, 3)}
        return report
    report = _fresh(job, trace, progress)
    cache.put("plan", key, json.dumps(report).encode())
    return report


def exit_code(report: Mapping[str, Any]) -> int:
    """71 when the step does not fit the memory, 70 when another budget is broken, else 0."""
    if not report["memory"]["fits"]:
        return 71
    return 70 if any(f["severity"] == "error" for f in report["findings"]) else 0


def plan_key(job: JobConfig) -> str:
    """Digest of what a plan depends on."""
    config = {k: v for k, v in job.as_dict().items() if k not in _NOT_IN_KEY}
    files = [path.as_posix().encode() + b"\0" + path.read_bytes() for path in source_files(job)]
    parts = [json.dumps(config, sort_keys=True).encode(), source_digest(PACKAGES).encode()]
    return digest([*parts, load_target(job.cluster.target).digest.encode(), *files])


def _fresh(job: JobConfig, trace: Path | None, progress: Progress | None) -> dict[str, Any]:
    from orchestrator.build import Stages, build
    from orchestrator.job import time_programs, unit_service
    from orchestrator.report import base_report
    from sim_cluster.trace import write_trace

    stages = Stages()
    with unit_service(job, progress) as service:
        built = build(job, service, stages)
    with stages.timed("time"):
        timings = time_programs(built, built.programs, trace is not None)
    if trace is not None:
        write_trace(trace, timings.chosen)
    return base_report(built, timings, service, stages, {})
