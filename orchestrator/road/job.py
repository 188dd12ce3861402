"""A job from end to end; it reads as the road of the data.

build (capture, import, recipe, partition, localize, cut, compile, link) -> bundle on disk -> load
it back -> time -> values against the unsharded step -> report.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from shardwright.compiler.neff.bundle import Bundle, load_bundle, write_bundle
from shardwright.compiler.steps import note
from shardwright.orchestrator.config.config import JobConfig, output_folder
from shardwright.orchestrator.config.importers.imported import Imported
from shardwright.orchestrator.dump import dumping
from shardwright.orchestrator.dump.step import time_text
from shardwright.orchestrator.report.page.page import PAGE, REPORT, write_report
from shardwright.orchestrator.report.report import base_report
from shardwright.orchestrator.report.text import Report
from shardwright.orchestrator.road.budgets import check_budgets, check_state
from shardwright.orchestrator.road.build import Built, compile_planned, planned
from shardwright.orchestrator.road.bundling import compiler_version, manifest_of
from shardwright.orchestrator.road.numerics import (
    Reference,
    Rounding,
    differences,
    metric_findings,
    numerics_section,
)
from shardwright.orchestrator.road.plan_cache import settled
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import time_programs
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.road.unsharded import Unsharded, unsharded
from shardwright.orchestrator.road.usage import check_room, check_usage
from shardwright.orchestrator.service.events import EventLog
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.service.ray_session import RaySession
from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.values.value_run import Values, run_values
from shardwright.sim_cluster.timing.faults import waiting


def run_job(
    job: JobConfig,
    progress: Progress,
    dump_dir: Path | None = None,
    inside: bool = False,
    source: Imported | None = None,
) -> dict[str, Any]:
    """Run a job and return its report, which is also written to the output directory; with
    `dump_dir` every stage, too, as text. `inside` a process that has code of the user's, see
    `plan_cache.plan`; `source` is the configuration that the job was read from, if it was. Raises
    the DiagnosticError of the stage that refuses."""
    check_usage(job)
    stages, out = Stages(begun=progress.stage), output_folder(job)
    if not job.output.events:
        job = job.but({"output.events": str(out / "events.jsonl")})
    # Units first, then hosts of ranks: one Ray for both.
    with outputs.held(out), RaySession.kept(job.run.hosts):
        with stages.timed("auto") if job.strategy.open_keys else nullcontext():
            fixed, told = settled(job, progress, inside)
        with dumping(dump_dir):
            report, trace = _run(fixed, out, stages, progress)
        report = told(report)
        if source:
            report["imported"] = source.section(report["findings"])
        _write(report, out, trace)
    return report


def _run(
    job: JobConfig, out: Path, stages: Stages, progress: Progress
) -> tuple[dict[str, Any], bytes]:
    """The report of a job that leaves nothing to the memory, and its trace."""
    with ExitStack() as beside:
        with unit_service(job, progress) as service:
            ready = planned(job, service, stages)
            check_state(ready)
            check_room(job.run.steps, ready.context, ready.mode)
            other = beside.enter_context(unsharded(ready.job, ready.layout.global_batch))
            built = compile_planned(ready, service, stages)
            check_budgets(built)
            with stages.timed("bundle"):
                bundle = write_and_load(built, out / "bundle")
            with stages.timed("time"):
                timings = time_programs(built, bundle.programs, service, traced=True)
        events = EventLog(job.output.events, service.job)
        for after_s, cores in waiting(built.layout.faults.late_cores):
            events("ranks.waiting", after_s=after_s, cores=list(cores))
        with stages.timed("values"):
            compared = _values(built, bundle, progress, events, other)
    sizes = program_sizes(bundle)
    report = base_report(built, timings, service, stages, sizes)
    note("time", lambda: time_text(report))
    report["numerics"] = numerics_section(job, *compared)
    values, reference, _ = compared
    parts = metric_findings(values, reference, built.layout.num_microbatches)
    report["findings"] += [finding.as_dict() for finding in (*values.findings, *parts)]
    return report, timings.trace


def _values(
    built: Built, bundle: Bundle, progress: Progress, events: EventLog, other: Unsharded | None
) -> tuple[Values, Reference | None, Rounding | None]:
    """The value run; what became of the unsharded one beside it; and, where values are outside of
    its bound, what rounding alone does to them."""
    if other is None:
        return run_values(built, bundle, progress, events), None, None
    values = run_values(built, bundle, progress, events, other.first_state)
    progress.say("waiting for the unsharded run")
    reference = other.reference()
    worst = differences(values.after_one, values.losses, reference)
    outside = [difference.name for difference in worst if not difference.share <= 1]
    if not outside:
        return values, reference, None
    progress.say(f"{' and '.join(outside)}: measuring what rounding alone does")
    return values, reference, other.rounding(built.layout.num_microbatches)


def exit_code(report: Report) -> int:
    """0, or 72 when the values left their bound."""
    return 0 if report["numerics"]["passed"] else 72


def write_and_load(built: Built, path: Path) -> Bundle:
    """Write the bundle and load it back from disk: everything after this comes from the files.
    Raises UsageError (SW_OUTPUT) where it cannot be written."""
    meta = {
        "compiler_version": compiler_version(),
        "graph": built.name,
        "strategy": built.plan.strategy,
        "lnc": built.layout.target.lnc,
        "hypothetical": built.layout.target.is_hypothetical,
    }
    with outputs.writing(path):
        write_bundle(path, manifest_of(built), built.programs, meta)
    return load_bundle(path, built.layout.target.name)


def program_sizes(bundle: Bundle) -> dict[str, int]:
    """File size of every program."""
    folder = bundle.path / "programs"
    return {
        name: (folder / f"{sha}.neff").stat().st_size
        for name, sha in bundle.manifest.programs.items()
    }


def _write(report: dict[str, Any], out: Path, trace: bytes) -> None:
    report["provenance"]["files"] = {
        "bundle": str(out / "bundle"),
        "report": str(out / REPORT),
        "page": str(out / PAGE),
        "trace": str(out / "trace.json"),
    }
    outputs.write(out / "trace.json", trace)
    write_report(report, out)
