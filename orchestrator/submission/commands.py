"""The verbs of this folder and their arguments; each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.arguments import asked_of, lazily, with_values
from shardwright.orchestrator.config.config import words_of
from shardwright.orchestrator.config.job_flags import (
    ENDINGS,
    add_job_flags,
    as_words,
    job_config,
    job_configs,
)
from shardwright.orchestrator.terminal.age import FLAG

COMMANDS = ("collect", "compile", "analyze", "clean", "clear-locks")


def add_verbs(verbs: Any) -> None:
    """Add them to the command."""
    _submit_parsers(verbs)
    _parallel_compile_parser(verbs)


def _parallel_compile_parser(verbs: Any) -> None:
    parallel = verbs.add_parser(
        "parallel-compile", help="collect the graphs of a script, and compile them together"
    )
    parallel.add_argument(
        "--command", choices=COMMANDS, default="", help="default: collect, then compile"
    )
    parallel.add_argument(
        "--analyze-output",
        type=Path,
        default=Path("model_analysis_result"),
        metavar="DIR",
        help="where analyze writes result.json",
    )
    parallel.add_argument(
        "--analyze-verbosity",
        type=int,
        choices=(1, 2),
        default=2,
        help="1: operators that are not supported; 2: all",
    )
    parallel.add_argument("--graphs", type=Path, metavar="DIR", help="graphs; default: ./graphs")
    _cc_flags_flag(parallel, "neuronx-cc's, after NEURON_CC_FLAGS")
    executors, forms = words_of("run.executor"), words_of("run.progress")
    parallel.add_argument("--executor", help=with_values("where units run", executors))
    parallel.add_argument("--workers", help="worker processes or Ray actors")
    parallel.add_argument("--progress", help=with_values("progress on stderr", forms))
    parallel.add_argument("--cache-dir", help="directory or s3:// URL of the unit cache")
    parallel.add_argument(FLAG, action="store_true", help="compile anew: nothing stored is used")
    parallel.add_argument("--json", action="store_true", help="print the summary as JSON")
    parallel.add_argument("script", nargs=argparse.REMAINDER, help="the command to collect from")
    parallel.set_defaults(verb=_parallel_compile)


def _submit_parsers(verbs: Any) -> None:
    submit = verbs.add_parser("submit", help="run a job on a Ray cluster and return its exit code")
    submit.add_argument(
        "jobs",
        type=Path,
        nargs="+",
        metavar="JOB",
        help="job.toml, or model files for compile, in the working directory",
    )
    _address_flag(submit)
    submit.add_argument("--detach", action="store_true", help="print the job's id and leave")
    submit.add_argument(
        "--working-dir", type=Path, default=Path("."), help="what is uploaded; default: this one"
    )
    submit.add_argument(
        "--env", action="append", default=[], metavar="KEY=VALUE", help="a variable of the job"
    )
    submit.add_argument("--compile-only", action="store_true", help="as of run")
    _cc_flags_flag(submit, "flags of compile, for model files, after NEURON_CC_FLAGS")
    add_job_flags(submit)
    submit.set_defaults(verb=_submit)
    status = verbs.add_parser("status", help="what became of a submitted job, or of all")
    status.add_argument("id", nargs="?", default="", help="the job's id; default: all jobs")
    _address_flag(status)
    status.add_argument("--follow", action="store_true", help="show its log to its end")
    status.json_flag()
    status.set_defaults(verb=_status)
    stop = verbs.add_parser("stop", help="stop a submitted job")
    stop.add_argument("id", help="the job's id")
    _address_flag(stop)
    stop.set_defaults(verb=lazily("submission.submit", "stop", "address", "id"))


def _cc_flags_flag(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--cc-flags", default="", metavar="FLAGS", help=text)


def _address_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", default="", help="URL of the cluster's dashboard; RAY_API_SERVER_ADDRESS"
    )


def _submit(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.submission import submit

    if _are_models(args.jobs):
        return submit.submit(_models(args))
    only(args.jobs, args.compile_only)
    folder = args.jobs[0].resolve().parent
    asked = asked_of(
        submit.Asked,
        args,
        jobs=job_configs(args, args.jobs, on_cluster=True),
        words=[*as_words(args, folder), *(["--compile-only"] if args.compile_only else [])],
        environment=_environment(args.env),
    )
    return submit.submit(asked)


def _are_models(files: Sequence[Path]) -> bool:
    """Whether model files are given, and not jobs. Raises UsageError for some of each."""
    models = [file for file in files if file.name.endswith(ENDINGS["hlo"])]
    if models and len(models) < len(files):
        raise UsageError(
            "SW_USAGE",
            f"submit requires jobs or model files, got {models[0]} beside others",
            hint="submit them one after the other",
        )
    return bool(models)


def _models(args: argparse.Namespace) -> Any:
    """`compile` of model files, with the flags that hold here. Raises UsageError for flags of a
    job."""
    from shardwright.orchestrator.compile.compile_flags import ENVIRONMENT, split_words
    from shardwright.orchestrator.submission import submit
    from shardwright.orchestrator.submission.graphs import CC_FLAGS

    if settings := as_words(args, args.jobs[0].resolve().parent):
        raise UsageError(
            "SW_USAGE",
            f"submit of a model file takes no key of a job, got {settings[1]}",
            hint=f"flags of compile are {CC_FLAGS} '--target trn1 ...'",
        )
    words = split_words(os.environ.get(ENVIRONMENT, ""), ENVIRONMENT)
    words += split_words(args.cc_flags, CC_FLAGS)
    return asked_of(
        submit.Models,
        args,
        files=args.jobs,
        flags=words,
        environment=_environment(args.env),
    )


def only(jobs: Sequence[Path], compile_only: bool) -> Path | None:
    """The first job file, if there is one. Raises UsageError for several where one is run."""
    if len(jobs) > 1 and not compile_only:
        raise UsageError(
            "SW_USAGE",
            f"run requires one job file, got {len(jobs)}",
            hint="several compile together with --compile-only",
        )
    return next(iter(jobs), None)


def compile_only(args: argparse.Namespace) -> int:
    """`run --compile-only`."""
    from shardwright.orchestrator.submission import compile_only

    if args.source:
        args.job = next(iter(args.jobs), None)
        named = {compile_only.NAMELESS: job_config(args)}
    else:
        jobs = job_configs(args, args.jobs or [None])
        named = {file or compile_only.NAMELESS: job for file, job in jobs.items()}
    return compile_only.run(named, args.json, args.again, args.dump_dir)


def _environment(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    if bad := [name for name, equals, _ in pairs if not name or not equals]:
        raise UsageError("SW_USAGE", f"--env requires KEY=VALUE, got {bad[0]!r}")
    return {name: value for name, _, value in pairs}


def _parallel_compile(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.compile.compile_flags import split_words
    from shardwright.orchestrator.submission import parallel_compile

    given = {f"run.{key}": getattr(args, key) for key in ("executor", "workers", "progress")}
    given |= {"cache.dir": args.cache_dir, "cache.fresh": args.fresh}
    job = config.with_absolute_paths(config.load(None, (), given))
    asked = asked_of(
        parallel_compile.Asked,
        args,
        script=args.script[1:] if args.script[:1] == ["--"] else args.script,
        flags=split_words(args.cc_flags, "--cc-flags"),
        job=job,
        as_json=args.json,
    )
    return parallel_compile.run(asked)


def _status(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.submission import submit

    if args.follow and not args.id:
        raise UsageError("SW_USAGE", "status --follow requires the id of a job, got none")
    return submit.status(args.address, args.id, args.follow, args.json)
