"""A job from end to end; it reads as the road of the data.

build (capture, import, recipe, partition, localize, cut, compile, link) -> bundle on disk -> load
it back -> values against the unsharded step -> time -> report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compiler.diagnostics import Diagnostic, UsageError
from compiler.isa.program import Program
from compiler.neff.bundle import Bundle, load_bundle, write_bundle
from orchestrator.budgets import check_budgets, check_state
from orchestrator.build import Built, Stages, compile_planned, planned
from orchestrator.bundling import compiler_version, manifest_of
from orchestrator.cache import Cache, default_directory
from orchestrator.collective_settings import job_settings
from orchestrator.config import JobConfig
from orchestrator.events import EventLog
from orchestrator.executor import Executor, InlineExecutor, Limits
from orchestrator.faults import faults_of
from orchestrator.host import num_cpus
from orchestrator.model import compute_type, resolve_task
from orchestrator.numerics import Reference, worst_leaf, worst_loss_error
from orchestrator.packets import packets_of
from orchestrator.progress import Progress
from orchestrator.report import base_report
from orchestrator.service import UnitService
from orchestrator.strict_json import dumps
from orchestrator.unsharded import unsharded
from sim_cluster.network import cluster_topology
from sim_cluster.run_values import ValueRun
from sim_cluster.step_time import Step, StepTiming, Timings, timed
from sim_cluster.trace import write_trace

VALUE_THREADS = 2
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Values:
    """What the value run gave: metrics per step, the state after one step, the L0 distances, and
    warnings.
    """

    losses: tuple[float, ...]
    after_one: Mapping[str, np.ndarray]
    l0: Mapping[str, float]
    findings: tuple[Diagnostic, ...] = ()


def run_job(job: JobConfig, progress: Progress) -> dict[str, Any]:
    """Run a job and return its report, which is also written to the output directory.

    Raises the DiagnosticError of the stage that refuses.
    """
    stages, out = Stages(), Path(job.output.dir)
    if not job.output.events:
        job = replace(job, output=replace(job.output, events=str(out / "events.jsonl")))
    with unit_service(job, progress) as service:
        ready = planned(job, service, stages)
        check_state(ready)
        built = compile_planned(ready, service, stages)
    check_budgets(built)
    with stages.timed("bundle"):
        bundle = write_and_load(built, out / "bundle")
    with unsharded(job, built.layout.global_batch) as reference, stages.timed("values"):
        values = run_values(built, bundle, progress)
        progress.say("waiting for the unsharded run")
        expected = reference()
    with stages.timed("time"):
        timings = time_programs(built, bundle.programs, traced=True)
    sizes = program_sizes(bundle)
    report = base_report(built, timings, service, stages, sizes)
    report["numerics"] = numerics_section(job, values, expected)
    report["findings"] += [f.as_dict() for f in values.findings]
    _write(report, out, timings.chosen)
    return report


def exit_code(report: Mapping[str, Any]) -> int:
    """0, or 72 when the values left their bound."""
    return 0 if report["numerics"]["passed"] else 72


def unit_service(job: JobConfig, progress: Progress | None) -> UnitService:
    """The unit service of a job: its executor (started when first needed), its cache, its log."""
    cache = Cache(default_directory(job.cache.dir))
    events = EventLog(Path(job.output.events) if job.output.events else None)
    return UnitService(executor_of(job), cache, progress.unit if progress else None, events)


def executor_of(job: JobConfig) -> Callable[[], Executor]:
    """How to start the job's executor. Raises UsageError for a time limit where nothing can end a
    unit."""
    run = job.run
    limits = Limits(run.unit_timeout_s, int(run.unit_memory_gib * GIB))
    if run.executor == "inline" and limits.timeout_s:
        raise UsageError(
            "SW_USAGE",
            "run.unit_timeout_s requires workers that can be ended, got run.executor = inline",
            hint="take --executor process",
        )

    def start() -> Executor:
        from orchestrator import process_backend

        match run.executor:
            case "ray":
                from orchestrator.ray_backend import RayExecutor

                return RayExecutor(run.workers, limits)
            case "process":
                return process_backend.ProcessExecutor(run.workers, limits)
            case "auto" if (run.workers or num_cpus()) > 1 or limits.timeout_s:
                return process_backend.AutoExecutor(run.workers, limits)
            case _:
                return InlineExecutor(limits)

    return start


def write_and_load(built: Built, path: Path) -> Bundle:
    """Write the bundle and load it back from disk: everything after this comes from the files."""
    meta = {
        "compiler_version": compiler_version(),
        "graph": built.name,
        "strategy": built.plan.strategy,
        "lnc": built.layout.target.lnc,
        "hypothetical": built.layout.target.is_hypothetical,
    }
    write_bundle(path, manifest_of(built), built.programs, meta)
    return load_bundle(path, built.layout.target.name)


def program_sizes(bundle: Bundle) -> dict[str, int]:
    """File size of every program."""
    folder = bundle.path / "programs"
    return {
        name: (folder / f"{sha}.neff").stat().st_size
        for name, sha in bundle.manifest.programs.items()
    }


def run_values(built: Built, bundle: Bundle, progress: Progress) -> Values:
    """All steps on all simulated cores, from the loaded bundle.

    Raises UsageError for a timing-only task.
    """
    from compiler.frontend.reference import batch_leaves, initial_state, task_batches

    job = built.job
    if job.run.steps < 1:
        raise UsageError("SW_STEPS", f"run.steps requires at least 1, got {job.run.steps}")
    task = resolve_task(job)
    state = initial_state(task, job.run.seed)
    batches = task_batches(task, job.run.seed, built.layout.global_batch, job.run.data)
    strict = job.run.strict_indices
    run = ValueRun(bundle.programs, bundle.manifest, threads=VALUE_THREADS, strict_indices=strict)
    run.load(state)
    losses: list[float] = []
    after_one: dict[str, np.ndarray] = {}
    for number in range(job.run.steps):
        metrics = run.step(batch_leaves(next(batches)))
        losses.append(float(metrics["metrics/loss"]))
        progress.step(number, job.run.steps, losses[-1], None)
        if number == 0:
            after_one = run.gather(state)
    run.close()
    l0 = {name: check.distance for name, check in run.result.l0.items()}
    return Values(tuple(losses), after_one, l0, tuple(run.watch.findings))


def numerics_section(job: JobConfig, values: Values, reference: Reference) -> dict[str, Any]:
    """The comparison with the unsharded run (docs/numerics.md)."""
    leaf, error = worst_leaf(values.after_one, reference.after_one)
    loss_error = worst_loss_error(values.losses, reference.losses)
    errors = (error, loss_error, *values.l0.values())
    return {
        "steps": job.run.steps,
        "losses": list(values.losses),
        "reference_losses": list(reference.losses),
        "worst_loss_error": loss_error,
        "worst_param_error": {"leaf": leaf, "error": error},
        "bound": reference.bound,
        "passed": all(e <= reference.bound for e in errors),
        "l0": dict(values.l0),
        "cast": compute_type(job),
    }


def step_of(built: Built, programs: Mapping[str, Program]) -> Step:
    """What is timed of a job."""
    instances = built.job.cluster.instances
    return Step(
        programs=programs,
        schedules=built.plan.step.schedules,
        transfers=built.plan.step.transfers,
        mesh=built.plan.step.mesh,
        target=built.layout.target,
        instances=instances,
        placement=built.placement,
        packets=packets_of(built.job.strategy),
        collectives=job_settings(built.job.cluster.collectives),
        whole_axes={name: built.plan.mesh.origin(name) for name in built.plan.mesh.names},
        faults=faults_of(built.job.faults, cluster_topology(built.layout.target, instances)),
    )


def time_programs(built: Built, programs: Mapping[str, Program], traced: bool = False) -> Timings:
    """The step under every profile, and without its faults; with a whole trace when `traced`.

    Raises SimulationError (SW_DEAD_CORE) when ranks wait for a dead core.
    """
    return timed(step_of(built, programs), built.job.cluster.profile, traced)


def _write(report: dict[str, Any], out: Path, timing: StepTiming) -> None:
    report["provenance"]["files"] = {
        "bundle": str(out / "bundle"),
        "report": str(out / "report.json"),
        "trace": str(out / "trace.json"),
    }
    write_trace(out / "trace.json", timing)
    (out / "report.json").write_text(dumps(report, indent=1))
