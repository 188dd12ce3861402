"""`plan`: the road without values, and the cache that answers a repeated question without jax.

The plan key covers the resolved job, the user's model files, what they read and our sources, so an
edited model is never answered from a stale plan. A hit reads one JSON document.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.diagnostics import Diagnostic
from compiler.documents import parse_json
from compiler.schema import Rule, several
from compiler.target import load_target
from orchestrator import outputs
from orchestrator.cache import About, Cache, open_cache
from orchestrator.config import TRIES, JobConfig
from orchestrator.model import installed, source_files
from orchestrator.reads import file_digests
from orchestrator.report.shape import check_report, check_whatif
from orchestrator.service.units import PACKAGES, digest, parts_digest, source_digest
from sharding.settings import AUTO

if TYPE_CHECKING:
    from orchestrator.service.executor import Executor
    from orchestrator.service.progress import Progress
    from orchestrator.stages import Traces

KIND, READS, WHATIF = "plan", "reads", "whatif"  # of entries
_READ = "read "
_PATHS = several(Rule("a path", lambda v: type(v) is str and "\0" not in v))
NOT_IN_KEY = ("output", "cache", "run", "base")


@dataclass(frozen=True, slots=True)
class Shared:
    """What jobs of one process have in common: where their units run, and captured steps."""

    executor: Callable[[], Executor]
    traces: Traces


def plan(
    job: JobConfig,
    trace: Path | None = None,
    progress: Progress | None = None,
    shared: Shared | None = None,
    dump_dir: Path | None = None,
) -> dict[str, Any]:
    """The report of a job without values, from the plan cache when nothing it depends on has
    changed; never when a `trace` is wanted, or every stage in `dump_dir`, which the cache does not
    hold."""
    start = time.perf_counter()
    cache = open_cache(job.cache)
    parts = plan_parts(job)
    key = parts_digest(KIND, parts)
    is_asked = trace is None and dump_dir is None
    stored = _stored(cache, KIND, key, check_report) if is_asked else None
    cache.tally.count(KIND, hit=stored is not None)
    cache.tally.save()
    if stored is not None:
        report: dict[str, Any] = stored
        provenance = report["provenance"]
        provenance["plan_key"] = key
        provenance["computed_in_s"] = round(sum(provenance["stages_s"].values()), 3)
        provenance["stages_s"] = {"cached plan": round(time.perf_counter() - start, 3)}
        return report
    with _dumped(dump_dir):
        report, reads = _fresh(job, trace, progress, shared)
    if job.model.entry:
        parts = _learned(job, parts, reads)
        key = parts_digest(KIND, parts)
    cache.put(KIND, key, json.dumps(report).encode(), About(plan_name(job), parts))
    report["provenance"]["plan_key"] = key
    told = {finding["message"] for finding in report["findings"]}
    for text in cache.warnings:  # not stored: they are of this run
        if text not in told:
            report["findings"].append(Diagnostic("SW_CACHE", text, severity="warning").as_dict())
    return report


def advised(
    job: JobConfig,
    trace: Path | None = None,
    progress: Progress | None = None,
    dump_dir: Path | None = None,
) -> dict[str, Any]:
    """As `plan`, with what is worth trying next, tried (`whatif/tries.py`) or known from before."""
    start = time.perf_counter()
    report = plan(job, trace, progress, dump_dir=dump_dir)
    if not job.run.tries:
        return report
    cache = open_cache(job.cache)
    plan_key, wanted = report["provenance"]["plan_key"], job.run.tries
    for tries in (TRIES, AUTO) if wanted == AUTO else (wanted,):
        key = parts_digest(WHATIF, _whatif_parts(plan_key, tries))
        stored = _stored(cache, WHATIF, key, check_whatif)
        if stored is not None:
            return report | {"whatif": stored}
    from orchestrator.whatif.tries import FAILED, advice, affordable

    count = affordable(wanted, report, start)
    section = advice(job, report, count, progress)
    if not any(row["status"] == FAILED for row in section["tried"]):
        parts = _whatif_parts(plan_key, count if count == TRIES else wanted)
        about = About(f"tries of {plan_name(job)}", parts)
        cache.put(WHATIF, parts_digest(WHATIF, parts), json.dumps(section).encode(), about)
    return report | {"whatif": section}


def _whatif_parts(plan_key: str, tries: int) -> dict[str, str]:
    return {"plan": plan_key, "tries": str(tries)}


def exit_code(report: Mapping[str, Any]) -> int:
    """71 when the step does not fit the memory, 70 when another budget is broken, else 0."""
    if not report["memory"]["fits"]:
        return 71
    return 70 if any(f["severity"] == "error" for f in report["findings"]) else 0


def plan_parts(job: JobConfig) -> dict[str, str]:
    """What a plan depends on, by name: every key of the job, the machine's table, the user's
    files, what an earlier capture of them read, installed packages and our sources."""
    tables = {name: keys for name, keys in job.as_dict().items() if name not in NOT_IN_KEY}
    parts = {
        f"{t}.{k}": json.dumps(value) for t, keys in tables.items() for k, value in keys.items()
    }
    parts["target"] = f"{job.cluster.target} {load_target(job.cluster.target).digest}"
    parts |= {f"file {p.as_posix()}": digest([p.read_bytes()]) for p in source_files(job)}
    parts["packages"] = digest(name.encode() for name in installed())
    parts |= {f"sources {name}": source_digest((name,)) for name in PACKAGES}
    if not job.model.entry:
        return parts
    stored = _stored(open_cache(job.cache), READS, parts_digest(READS, parts), _check_paths)
    return parts | _read_parts(file_digests(stored or ()))


def _stored(cache: Cache, kind: str, key: str, check: Callable[[Any], None]) -> Any | None:
    """The document of an entry. One that holds something else than we store is set aside, and
    counts as absent: others can write to a cache."""
    data = cache.get(kind, key)
    if data is None:
        return None
    try:
        found = parse_json(data)
        check(found)
    except ValueError:
        cache.set_aside(kind, key)
        return None
    return found


def _check_paths(found: Any) -> None:
    _PATHS.require(found, "files that were read")


def _read_parts(digests: Mapping[str, str]) -> dict[str, str]:
    return {f"{_READ}{path}": value for path, value in digests.items()}


def _learned(job: JobConfig, parts: Mapping[str, str], reads: Mapping[str, str]) -> dict[str, str]:
    """The parts of a plan with the files that its capture read, whose list is kept for the next
    question."""
    own = {name: value for name, value in parts.items() if not name.startswith(_READ)}
    about = About(f"files read by {plan_name(job)}", own)
    listed = json.dumps(list(reads)).encode()
    open_cache(job.cache).put(READS, parts_digest(READS, own), listed, about)
    return own | _read_parts(reads)


def plan_key(job: JobConfig) -> str:
    """Digest of what a plan depends on."""
    return parts_digest(KIND, plan_parts(job))


def plan_name(job: JobConfig) -> str:
    """What people call a plan."""
    model = job.model.preset or job.model.config or job.model.entry or job.model.hlo
    model = "/".join(Path(model).parts[-2:])
    return f"{model} {job.strategy.name} on {job.cluster.instances} {job.cluster.target}"


def _fresh(
    job: JobConfig, trace: Path | None, progress: Progress | None, shared: Shared | None
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The report, and the digests of what the user's function read."""
    from compiler.steps import note
    from orchestrator.build import build
    from orchestrator.dump.step import time_text
    from orchestrator.job import time_programs, unit_service
    from orchestrator.report.report import base_report
    from orchestrator.stages import Stages

    stages = Stages(traces=shared.traces) if shared else Stages()
    with unit_service(job, progress, shared.executor if shared else None) as service:
        built = build(job, service, stages)
        with stages.timed("time"):
            timings = time_programs(built, built.programs, service, trace is not None)
    if trace is not None:
        outputs.write(trace, timings.trace, "--trace")
    report = base_report(built, timings, service, stages, {})
    note("time", lambda: time_text(report))
    return report, stages.traces.reads(job)


def _dumped(folder: Path | None) -> AbstractContextManager[None]:
    """A stored answer loads nothing that a dump needs."""
    if folder is None:
        return nullcontext()
    from orchestrator.dump import dumping

    return dumping(folder)
