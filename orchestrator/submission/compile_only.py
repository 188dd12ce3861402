"""`run --compile-only`: job files to bundles, without values or times.

Several jobs share one service: all are planned first, then their units are one batch, so that no
worker waits for the next job to be captured (`together.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.compiler.diagnostics import Diagnostic, UsageError
from shardwright.orchestrator.config.config import JobConfig, output_folder
from shardwright.orchestrator.dump import FLAG, Dump
from shardwright.orchestrator.road.budgets import check_budgets, check_state
from shardwright.orchestrator.road.build import Planned, compile_parts, planned, with_programs
from shardwright.orchestrator.road.job import program_sizes, write_and_load
from shardwright.orchestrator.road.parts import Parts
from shardwright.orchestrator.road.plan_cache import settled
from shardwright.orchestrator.road.stages import Stages, Traces
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.service.service import Settled, UnitService
from shardwright.orchestrator.submission.together import (
    Ended,
    Task,
    UnitCounts,
    compile_together,
    end_as_dict,
)
from shardwright.orchestrator.terminal import outputs, terminal
from shardwright.orchestrator.terminal.strict_json import dumps
from shardwright.orchestrator.terminal.terminal import say, say_json

Jobs = Mapping[Path, JobConfig]
"""Jobs by their files."""
SUMMARY = "compile.json"
NAMELESS = Path("job")
"""What a job is called that no file describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledJob:
    """What became of one job: its units, its programs (name -> bytes of its NEFF), or its error."""

    job: str
    bundle: str
    units: UnitCounts
    programs: Mapping[str, int] = field(default_factory=dict)
    error: Diagnostic | None = None
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSummary:
    """What became of all jobs. Units that jobs share count once in `units`."""

    jobs: tuple[CompiledJob, ...]
    units: UnitCounts
    seconds: float
    findings: tuple[Diagnostic, ...] = ()
    unwritten: Diagnostic | None = None  # why this summary is in no file

    @property
    def exit_code(self) -> int:
        """0, that of the first job that failed, or of a summary that could not be written."""
        failed = (job.exit_code for job in self.jobs if job.exit_code)
        return next(failed, UsageError.exit_code if self.unwritten else 0)

    @property
    def told(self) -> list[Diagnostic]:
        """What there is to say besides."""
        return [*self.findings, *([self.unwritten] if self.unwritten else [])]

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema": 1,
            "exit_code": self.exit_code,
            "seconds": self.seconds,
            "units": asdict(self.units),
            "jobs": list(map(end_as_dict, self.jobs)),
            "findings": [finding.as_dict() for finding in self.told],
        }


@dataclass(slots=True)
class _Work:
    """A job on its way to `bundle`."""

    job: JobConfig
    bundle: Path
    service: UnitService
    stages: Stages
    recorded: Callable[[], AbstractContextManager[None]]
    held: ExitStack  # what is held until all jobs have ended
    programs: dict[str, int] = field(default_factory=dict)
    ready: Planned | None = None

    def prepare(self) -> Parts:
        """Plan, and cut into units."""
        self.held.enter_context(outputs.held(self.bundle.parent))
        fixed, _ = settled(self.job)
        with self.recorded():
            self.ready = planned(fixed, self.service, self.stages)
            check_state(self.ready)
            return compile_parts(self.ready, self.stages)

    def finish(self, parts: Parts, settled: Settled) -> None:
        """Link, check, write."""
        assert self.ready is not None
        with self.recorded():
            built = with_programs(self.ready, parts, settled, self.stages)
        check_budgets(built)
        self.programs = program_sizes(write_and_load(built, self.bundle))


def compile_jobs(jobs: Jobs, progress: Progress, dump_dir: Path | None = None) -> CompileSummary:
    """Compile jobs; bundles lie in their output directories, by the name of the job file where
    there are several, and so do the folders of `dump_dir`, where every stage goes as text. Raises
    UsageError for jobs that cannot share a service, or would write to one place."""
    start, traces = time.perf_counter(), Traces()
    places = places_of(jobs)
    with ExitStack() as held, unit_service(shared_by(jobs), progress) as service:
        works = []
        for file, job in jobs.items():
            work = _Work(job, places[file], service, Stages(traces=traces), nullcontext, held)
            if dump_dir is not None:
                folder = dump_dir / file.stem if len(jobs) > 1 else dump_dir
                held.enter_context(outputs.held(folder, FLAG))
                work.recorded, work.stages = Dump(folder).recorded, Stages()  # captures of its own
            works.append(work)
        tasks = [Task(work.prepare, work.finish) for work in works]
        ended, counts = compile_together(tasks, service)
    return CompileSummary(
        jobs=tuple(map(_told, jobs, works, ended)),
        units=counts,
        seconds=round(time.perf_counter() - start, 3),
        findings=tuple(service.findings),
    )


def places_of(jobs: Jobs) -> dict[Path, Path]:
    """The bundle of every job file. Raises UsageError when two would be one."""
    places: dict[Path, Path] = {}
    for file, job in jobs.items():
        folder = output_folder(job) / file.stem if len(jobs) > 1 else output_folder(job)
        others = [other for other, place in places.items() if place == folder / "bundle"]
        if others:
            raise UsageError(
                "SW_USAGE",
                f"--compile-only requires a place for every job, got {folder} for {others[0]} and"
                f" {file}",
                hint="give the job files different names, or an output.dir each",
            )
        places[file] = folder / "bundle"
    return places


def shared_by(jobs: Jobs) -> JobConfig:
    """The first job, whose executor, cache and event log all use. Raises UsageError."""
    (name, first), *others = jobs.items()
    if not first.output.events:
        first = first.but({"output.events": str(output_folder(first) / "events.jsonl")})
    for other, job in others:
        for table in ("executor", "workers", "unit_timeout_s", "unit_memory_gib"):
            given, wanted = getattr(job.run, table), getattr(first.run, table)
            if given != wanted:
                raise _differs(f"run.{table}", (name, wanted), (other, given))
        if job.cache != first.cache:
            raise _differs("[cache]", (name, first.cache), (other, job.cache))
    return first


def _differs(key: str, first: tuple[Path, Any], other: tuple[Path, Any]) -> UsageError:
    return UsageError(
        "SW_USAGE",
        f"jobs that compile together require one {key}, got {first[1]!r} in {first[0]} and"
        f" {other[1]!r} in {other[0]}",
        hint="set it for all on the command line, or compile them apart",
    )


def _told(file: Path, work: _Work, ended: Ended) -> CompiledJob:
    return CompiledJob(
        job=str(file),
        bundle=str(work.bundle) if work.programs else "",
        programs=work.programs,
        **ended.as_fields(),
    )


def run(jobs: Jobs, as_json: bool, again: str, dump_dir: Path | None = None) -> int:
    """Compile, show and store the summary; `again` is the command that asks anew. Returns the exit
    code."""
    first = next(iter(jobs.values()))
    with Progress("quiet" if as_json else first.run.progress) as progress:
        summary = compile_jobs(jobs, progress, dump_dir)
    try:
        outputs.write(output_folder(first) / SUMMARY, dumps(summary.as_dict(), indent=1))
    except UsageError as error:  # bundles are there, and what was to be said of them is said
        summary = replace(summary, unwritten=error.diagnostic)
    if as_json:
        say_json(summary.as_dict())
    else:
        _screen(summary, terminal.console(), again)
    return summary.exit_code


def _screen(summary: CompileSummary, console: Console, again: str) -> None:
    right = ("units", "cached", "compiled", "failed", "NEFFs", "MB")
    table = terminal.table("job", *right, right=right, overflow="fold", box=None, pad_edge=True)
    for job in summary.jobs:
        sizes = job.programs.values()
        table.add_row(job.job, *job.units.cells(), f"{len(sizes)}", f"{sum(sizes) / 1e6:.2f}")
    units, done = summary.units, sum(not job.error for job in summary.jobs)
    console.print(table)
    console.print(
        f"{done} of {len(summary.jobs)} jobs in {summary.seconds:.1f} s; {units.total} distinct"
        f" units: {units.cached} cached, {units.compiled} compiled, {units.failed} failed",
        soft_wrap=True,
    )
    if text := units.stored_text(again):
        say(text)
    for job in summary.jobs:
        if job.error:
            say(f"{job.job}: {job.error.render()}", err=True)
        else:
            say(f"{job.job}: {job.bundle}")
    for finding in summary.told:
        say(finding.render(), err=True)
