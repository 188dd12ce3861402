"""`shardwright submit`, `status`, `stop`: a job file, or a model file for `compile`, to a Ray
cluster, and its exit code back.

What goes up: the working directory (as `ray job submit` does, `.gitignore` and `.rayignore`
honoured) and, unless that is a checkout, our packages, so that the cluster needs our dependencies
only. The job is read here first: what `run` would refuse is refused before anything is uploaded.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.table import Table

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.surface.resolve import resolve
from shardwright.orchestrator.cache.location import locate
from shardwright.orchestrator.compile.compile_flags import flags_alone
from shardwright.orchestrator.config.config import JobConfig, check_lasting, is_relative
from shardwright.orchestrator.config.model_file import is_text, model_path
from shardwright.orchestrator.host import DOOR
from shardwright.orchestrator.road.usage import check_usage
from shardwright.orchestrator.submission.compile_only import places_of, shared_by
from shardwright.orchestrator.submission.graphs import CC_FLAGS
from shardwright.orchestrator.submission.ray_jobs import JobState, RayJobs, Submission
from shardwright.orchestrator.submission.secrets import check_environment
from shardwright.orchestrator.terminal.terminal import console, one_line, say, say_json

_COMMAND = ("python", "-m", "shardwright")
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `submit` was asked: job files, what `run` is told besides, and where to."""

    jobs: Mapping[Path, JobConfig]
    words: Sequence[str]
    address: str
    working_dir: Path
    environment: Mapping[str, str]
    detach: bool = False
    compile_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What `submit` was asked to compile: model files, the flags of `compile`, and where to."""

    files: Sequence[Path]
    flags: Sequence[str]
    address: str
    working_dir: Path
    environment: Mapping[str, str]
    detach: bool = False


def submission(asked: Asked) -> Submission:
    """The job as a Ray job. Raises UsageError for a job file outside of the working directory, an
    output that would be lost with the job, variables that are secret, and what `run` would refuse
    as usage there."""
    check_environment(asked.environment)
    for job in asked.jobs.values():
        check_lasting(job)
        if job.cache.dir:
            locate(job.cache.dir)  # one with credentials would be seen in the job's command
    folder = asked.working_dir.resolve()
    files = [_inside(path, folder) for path in asked.jobs]
    for job in asked.jobs.values():
        _check(job, folder, asked.compile_only)
    if asked.compile_only:
        places_of(asked.jobs)
        shared_by(asked.jobs)
    return _sent_from(folder, ["run", *files, *asked.words], asked.environment)


def model_submission(asked: Models) -> Submission:
    """`compile` of model files as a Ray job. Raises UsageError for what `compile` would refuse as
    usage, files outside of the working directory, and an output that would be lost with the job."""
    check_environment(asked.environment)
    folder = asked.working_dir.resolve()
    files = [_inside(path, folder) for path in asked.files]
    command = resolve(flags_alone(asked.flags, CC_FLAGS)).command
    for flag, path in (("--output", command.output), ("--cache_dir", command.cache_dir)):
        if is_relative(path):
            raise UsageError(
                "SW_RELATIVE_OUTPUT",
                f"{flag} requires an absolute path inside a Ray job, got {path}",
                hint=f"pass --cc-flags '{flag} /absolute/path', of a folder that outlives the job",
            )
    if command.cache_dir:
        locate(command.cache_dir, source="--cache_dir")
    return _sent_from(folder, ["compile", *files, *asked.flags], asked.environment)


def _sent_from(folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> Submission:
    """A command of ours in a copy of a folder; our packages go with it unless they are there."""
    packages = () if (folder / DOOR.name / "__init__.py").exists() else (DOOR,)
    return Submission(
        command=shlex.join([*_COMMAND, *words]),
        working_dir=folder,
        packages=packages,
        environment={**_ENVIRONMENT, **environment},
    )


def _check(job: JobConfig, folder: Path, compile_only: bool) -> None:
    """Refuse what `run` would refuse in a copy of `folder`, and what would not be in it."""
    given = job.model.config or job.model.hlo or job.model.graph
    if given and not os.path.isabs(given) and not is_text(given):
        _inside(model_path(job), folder)
    check_usage(job, has_values=not compile_only, copied=folder)


def _inside(path: Path, folder: Path) -> str:
    try:
        return path.resolve().relative_to(folder).as_posix()
    except ValueError as error:
        raise UsageError(
            "SW_USAGE",
            f"submit requires a job and its model inside of the working directory {folder}, got"
            f" {path}",
            hint="--working-dir is what is uploaded: the job file and all it names lie in it",
        ) from error


def submit(asked: Asked | Models) -> int:
    """Submit, and follow unless detached; returns the exit code of the job, 0 when detached."""
    prepared = submission(asked) if isinstance(asked, Asked) else model_submission(asked)
    jobs = RayJobs(asked.address)
    job = jobs.submit(prepared)
    if asked.detach:
        say(job)
        _say(f"status: {_next('status', job, jobs)}\nstop:   {_next('stop', job, jobs)}")
        return 0
    _say(f"job {job} on {jobs.address}: {prepared.command}")
    return follow(jobs, job)


def follow(jobs: RayJobs, job: str) -> int:
    """Show the log of a job until it has ended; its exit code. An interrupt leaves it alone."""
    goes_on = (
        f"\njob {job} goes on\nfollow: {_next('status', job, jobs)} --follow\n"
        f"stop:   {_next('stop', job, jobs)}"
    )
    try:
        state = jobs.follow(job, _write)
    except KeyboardInterrupt:
        _say(goes_on)
        return 130
    except UsageError as error:
        if error.code == "SW_RAY_ADDRESS":
            _say(goes_on)
        raise
    code = state.result
    _say(f"job {job}: {state.status}, exit code {code}")
    return code


def status(address: str, job: str, follows: bool, as_json: bool) -> int:
    """Print what became of a job, or of all; with `follows`, its log, and its exit code back."""
    jobs = RayJobs(address)
    if follows:
        return follow(jobs, job)
    states = [jobs.state(job)] if job else jobs.states()
    if as_json:
        rows = [asdict(state) for state in states]
        say_json(rows[0] if job else rows)
    elif job:
        _print_state(states[0])
    else:
        _print_states(states)
    return 0


def stop(address: str, job: str) -> int:
    """Stop a job and say how it ended."""
    say(_ended(RayJobs(address).stop(job)))
    return 0


def _print_states(states: Sequence[JobState]) -> None:
    """One line each: ids whole, so that they can be copied; commands as far as there is room."""
    table = Table("job", "status", "code", "started", "seconds", box=None, expand=True)
    table.add_column("command", no_wrap=True, ratio=1)
    for state in states:
        code = "" if state.exit_code is None else str(state.exit_code)
        command = state.command.removeprefix(f"{shlex.join(_COMMAND)} ")
        cells = (state.id, state.status, code, _clock(state.started_s), _took(state), command)
        table.add_row(*map(one_line, cells))
    console().print(table)


def _print_state(state: JobState) -> None:
    say(_ended(state))
    rows = {
        "command": state.command,
        "started": _clock(state.started_s),
        "seconds": _took(state),
        "message": state.message,
    }
    say("\n".join(f"{name:<9}{one_line(text)}" for name, text in rows.items() if text))


def _clock(unix_s: float | None) -> str:
    try:
        return "" if unix_s is None else datetime.fromtimestamp(unix_s).strftime("%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # no time of ours
        return "?"


def _took(state: JobState) -> str:
    if state.started_s is None or state.ended_s is None:
        return ""
    return f"{state.ended_s - state.started_s:.0f}"


def _ended(state: JobState) -> str:
    code = "" if state.exit_code is None else f", exit code {state.exit_code}"
    return one_line(f"job {state.id}: {state.status}{code}")


def _next(verb: str, job: str, jobs: RayJobs) -> str:
    return f"shardwright {verb} {job} --address {shlex.quote(jobs.address)}"


def _write(text: str) -> None:
    # A bar that goes back to the start of its line is a line each time.
    say(text.replace("\r\n", "\n").replace("\r", "\n"), end="")


def _say(text: str) -> None:
    say(text, err=True)
