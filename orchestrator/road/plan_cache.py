"""`plan`: the road without values, and the cache that answers a repeated question without jax.

The plan key of a command covers the resolved job, the user's model files, what they read and our
sources, so an edited model is never answered from a stale plan. A hit reads one JSON document. A
question inside a process that goes on, and an answer of one that cannot be sure to have imported
the files as they are, has a key of what was traced (docs/design/0054-keys-of-questions.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import Diagnostic, DiagnosticError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.support.documents import parse_json
from shardwright.compiler.support.schema import Rule, several
from shardwright.orchestrator.cache import About, Cache, open_cache
from shardwright.orchestrator.changes.change import as_chosen
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model import MODELS, own_settings, source_files
from shardwright.orchestrator.keys.environment import always
from shardwright.orchestrator.keys.reads import Reads, observed
from shardwright.orchestrator.report.goal import bought
from shardwright.orchestrator.report.shape import check_report
from shardwright.orchestrator.report.text import Report
from shardwright.orchestrator.service.units import (
    PACKAGES,
    KeyParts,
    digest,
    parts_digest,
    source_digest,
)
from shardwright.orchestrator.terminal import outputs

if TYPE_CHECKING:
    from shardwright.orchestrator.road.stages import Stages, Traces
    from shardwright.orchestrator.service.executor import Start
    from shardwright.orchestrator.service.progress import Progress

KIND, READS = "plan", "reads"  # of entries
MOST_LISTS = 16
"""Lists of what captures read that are kept for one job, the newest first (our choice): which files
are read depends on what is in others, and who takes a change back asks the older question again."""
_ABSENT: tuple[None, float] = None, 0.0
_OWN, _READ = "file ", "model's "
_NAMES = several(Rule("a name", lambda v: type(v) is str and "\0" not in v))
_LISTS = several(_NAMES, most=MOST_LISTS)
NOT_IN_KEY = ("output", "cache", "run", "goal", "price", "base")


@dataclass(frozen=True, slots=True)
class Shared:
    """What jobs of one process have in common: where their units run, and captured steps."""

    executor: Start
    traces: Traces


def plan(
    job: JobConfig,
    trace: Path | None = None,
    progress: Progress | None = None,
    shared: Shared | None = None,
    dump_dir: Path | None = None,
    inside: bool = False,
    task: TrainTask | None = None,
) -> dict[str, Any]:
    """The report of a job without values, from the plan cache when nothing it depends on has
    changed; never when a `trace` is wanted, or every stage in `dump_dir`, which the cache does not
    hold. `inside` a process that has code of the user's the step is traced to know, and always
    that of a `task` that stands for the model."""
    start = time.perf_counter()
    inside = inside or task is not None
    stages = _stages(shared, task) if inside else None
    asked = _Asked(trace, progress, shared, dump_dir, inside)
    if stages and job.strategy.open_keys:  # no trace is that of the question; its candidates' are
        return _chosen(job, asked, stages)
    cache = open_cache(job.cache)
    parts = _traced(job, stages) if stages else plan_parts(job)
    key = parts_digest(KIND, parts)
    found, stored_s = _ABSENT if asked.has_files else stored(cache, KIND, key, check_report)
    cache.tally.count(KIND, hit=found is not None)
    cache.tally.save()
    if found is not None:
        report: dict[str, Any] = found
        provenance = report["provenance"]
        provenance["plan_key"], provenance["stored_s"] = key, stored_s
        provenance["computed_in_s"] = round(sum(provenance["stages_s"].values()), 3)
        provenance["stages_s"] = {"cached plan": round(time.perf_counter() - start, 3)}
        return bought(report, job, load_target(job.cluster.target))
    stages = stages or _stages(shared)
    report = (_chosen if job.strategy.open_keys else _fresh)(job, asked, stages)
    if not inside:
        learned = _answered(job, as_chosen(job, report), parts, stages)
        if learned is None:
            return report
        parts = learned
        key = parts_digest(KIND, parts)
    cache.put(KIND, key, json.dumps(report).encode(), About(plan_name(job), parts))
    report["provenance"]["plan_key"] = key
    told = {finding["message"] for finding in report["findings"]}
    for text in cache.warnings:  # not stored: they are of this run
        if text not in told:
            report["findings"].append(Diagnostic("SW_CACHE", text, severity="warning").as_dict())
    return report


def settled_before(job: JobConfig) -> JobConfig | None:
    """The job with what was chosen for it, where that is stored; a job that leaves nothing to the
    memory is itself."""
    if not job.strategy.open_keys:
        return job
    report, _ = stored(open_cache(job.cache), KIND, plan_key(job), check_report)
    return None if report is None else as_chosen(job, report)


def settled(
    job: JobConfig, progress: Progress | None = None, inside: bool = False
) -> tuple[JobConfig, Callable[[dict[str, Any]], dict[str, Any]]]:
    """The job with what was chosen for it, and what makes the report of that job one of the job as
    it was asked for. A job that leaves nothing to the memory is itself; another is planned, unless
    that plan is stored."""
    if not job.strategy.open_keys:
        return job, lambda report: report
    from shardwright.orchestrator.road.fitting import asked_as

    planned = plan(job, progress=progress, inside=inside)
    return as_chosen(job, planned), lambda report: asked_as(report, job, planned["auto"])


def exit_code(report: Report) -> int:
    """71 when the step does not fit the memory, 70 when another budget is broken, else 0."""
    if not report["memory"]["fits"]:
        return 71
    return 70 if any(f["severity"] == "error" for f in report["findings"]) else 0


def plan_parts(job: JobConfig) -> KeyParts:
    """What the plan of a new command depends on, by name: every key of the job, the machine's
    table, the user's files, what an earlier capture of them read, what every capture depends on and
    our sources."""
    own = _own_parts(job)
    if not job.model.entry:
        return own
    cache = open_cache(job.cache)
    asked = [own | _read_parts(observed(names)) for names in _read_lists(cache, own)] or [own]
    if len(asked) > 1:  # an earlier list that has its answer: of a change that was taken back
        for parts in asked:
            if cache.find(KIND, parts_digest(KIND, parts)) is not None:
                return parts
    return asked[0]


def _own_parts(job: JobConfig) -> KeyParts:
    files = {f"{_OWN}{path.as_posix()}": digest([path.read_bytes()]) for path in source_files(job)}
    return _common_parts(job) | files


def _common_parts(job: JobConfig) -> KeyParts:
    """What is known without the model."""
    tables = {name: keys for name, keys in job.as_dict().items() if name not in NOT_IN_KEY}
    parts = {
        f"{t}.{k}": json.dumps(value) for t, keys in tables.items() for k, value in keys.items()
    }
    model = job.model
    if model.entry or model.hlo or model.graph:  # which obey or refuse what is said, also the usual
        parts["settings"] = json.dumps(own_settings(job))
    parts["target"] = f"{job.cluster.target} {load_target(job.cluster.target).digest}"
    parts |= {f"sources {name}": source_digest((name,)) for name in PACKAGES}
    return parts | always()


def stored(
    cache: Cache, kind: str, key: str, check: Callable[[Any], None]
) -> tuple[Any | None, float]:
    """The document of an entry, and when it was stored. One that holds something else than we store
    is set aside, and counts as absent: others can write to a cache."""
    entry = cache.find(kind, key)
    if entry is None:
        return _ABSENT
    try:
        found = parse_json(entry.payload)
        check(found)
    except (TypeError, ValueError):
        cache.set_aside(kind, key)
        return _ABSENT
    return found, entry.about.stored_s


def _read_lists(cache: Cache, own: KeyParts) -> list[list[str]]:
    """What captures of a job have read, the newest first."""
    check = partial(_LISTS.require, where="lists of names of what was read")
    return stored(cache, READS, parts_digest(READS, own), check)[0] or []


def _read_parts(digests: Reads) -> KeyParts:
    """Without what was looked for and is not there, of which there is a lot."""
    return {f"{_READ}{name}": value for name, value in digests.items() if value}


def _stages(shared: Shared | None, task: TrainTask | None = None) -> Stages:
    from shardwright.orchestrator.road.stages import Stages, Traces

    return Stages(traces=shared.traces if shared else Traces(task))


def _traced(job: JobConfig, stages: Stages) -> KeyParts:
    """What a plan of the step as it is traced here depends on: every step it may be traced with.
    What a process has imported, changed or configured need not be what its files say: a cell of a
    notebook, a closure, `jax.config.update`. All of it is in the trace. Raises what `placed_task`
    raises."""
    from shardwright.orchestrator.road.build import candidates
    from shardwright.orchestrator.road.capture import placed_task

    layout, task = placed_task(job, stages)
    tried = candidates(job, layout, task.mode)
    samples = {n for one in tried for n in (one.samples, one.proof_samples) if n}
    place = f"{layout.mesh} {layout.captured_batch} {task.tokens_per_sample} {task.samples}"
    steps = {f"traced step of {n}": _step(job, task, n, stages) for n in samples}
    return _common_parts(job) | {"traced layout": place} | steps


def _step(job: JobConfig, task: TrainTask, samples: int, stages: Stages) -> str:
    """The digest of a step, or why there is none: it may still be planned with other samples."""
    try:
        return stages.trace(job, task, samples).digest
    except DiagnosticError as error:
        return digest([repr(error.diagnostic).encode()])


def _answered(job: JobConfig, built: JobConfig, parts: KeyParts, stages: Stages) -> KeyParts | None:
    """The parts of a plan that was made for a command, as which `built` was: of the files, unless
    this process has imported others, or they have changed meanwhile; None where then no trace is
    that of the question."""
    from shardwright.orchestrator.keys.freshness import Folder

    folder = Folder.of(job)
    own = {name: value for name, value in parts.items() if not name.startswith(_READ)}
    held = folder.is_as_first() and not stages.traces.is_doubtful(built)
    if not held or own != _own_parts(job):
        return None if job.strategy.open_keys else _traced(job, stages)
    reads = stages.traces.reads(built)
    return _learned(job, own, {**reads, **folder.first}) if job.model.entry else own


def _learned(job: JobConfig, own: KeyParts, reads: Reads) -> KeyParts:
    """The parts of a plan with what its capture read, whose names are kept for the next
    question."""
    cache, newest = open_cache(job.cache), list(reads)
    lists = [newest, *(names for names in _read_lists(cache, own) if names != newest)]
    about = About(f"read by {plan_name(job)}", own)
    listed = json.dumps(lists[:MOST_LISTS]).encode()
    cache.put(READS, parts_digest(READS, own), listed, about)
    return own | _read_parts(reads)


def plan_key(job: JobConfig) -> str:
    """Digest of what a plan depends on."""
    return parts_digest(KIND, plan_parts(job))


def plan_name(job: JobConfig) -> str:
    """What people call a plan."""
    model = next(filter(None, (getattr(job.model, name) for name in MODELS)), "a task")
    model = "/".join(Path(model).parts[-2:])
    return f"{model} {job.strategy.name} on {job.cluster.instances} {job.cluster.target}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked about a job besides its plan, and what it shares."""

    trace: Path | None
    progress: Progress | None
    shared: Shared | None
    dump_dir: Path | None
    inside: bool

    @property
    def has_files(self) -> bool:
        """Whether more is wanted than the report, which alone is stored."""
        return self.trace is not None or self.dump_dir is not None

    @property
    def executor(self) -> Start | None:
        """The executor that is shared."""
        return self.shared.executor if self.shared else None


def _fresh(job: JobConfig, asked: _Asked, stages: Stages) -> dict[str, Any]:
    """The report of a job that leaves nothing to the memory."""
    from shardwright.compiler.steps import note
    from shardwright.orchestrator.dump import dumping
    from shardwright.orchestrator.dump.step import time_text
    from shardwright.orchestrator.report.report import base_report
    from shardwright.orchestrator.road.build import build
    from shardwright.orchestrator.road.timing import time_programs
    from shardwright.orchestrator.road.units import unit_service

    with dumping(asked.dump_dir):
        with unit_service(job, asked.progress, asked.executor) as service:
            built = build(job, service, stages)
            with stages.timed("time"):
                timings = time_programs(built, built.programs, service, asked.trace is not None)
        if asked.trace is not None:
            outputs.write(asked.trace, timings.trace, "--trace")
        report = base_report(built, timings, service, stages, {})
        note("time", lambda: time_text(report))
    return report


def _chosen(job: JobConfig, asked: _Asked, stages: Stages) -> dict[str, Any]:
    """The report of a job with what fits it best; traces and dumps are of that alone."""
    from shardwright.orchestrator.road.build import Planned, planned
    from shardwright.orchestrator.road.fitting import Road, asked_as, chosen
    from shardwright.orchestrator.road.stages import Stages
    from shardwright.orchestrator.road.units import executor_of, unit_service

    executor = asked.executor or executor_of(job)
    again = partial(
        plan,
        progress=asked.progress,
        shared=Shared(executor, stages.traces),
        inside=asked.inside,
    )

    def ready(one: JobConfig) -> Planned:
        with unit_service(one, asked.progress, executor) as service:
            return planned(one, service, Stages(traces=stages.traces))

    report = chosen(job, Road(ready, again))
    if not asked.has_files:
        return report
    shown = again(as_chosen(job, report), asked.trace, dump_dir=asked.dump_dir)
    return asked_as(shown, job, report["auto"])
