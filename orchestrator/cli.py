"""The `shardwright` command: arguments in, one verb run, exit code out.

Exit codes (docs/commands.md): 0 done, 2 usage, 70 compile failure, 71 does not fit, 72 simulated
run failed, 130 interrupted. Verbs import what they need when they run, so `--help` loads no heavy
library.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from shardwright.compiler.frontend.graphs.forms import NAMES
from shardwright.compiler.frontend.user_code import told
from shardwright.compiler.machine.target import FIRST_TARGET, machine_name
from shardwright.orchestrator.cache import commands as cache
from shardwright.orchestrator.commands import doctor
from shardwright.orchestrator.compile.compile_flags import split_verb
from shardwright.orchestrator.config.arguments import Parser, asked_of, comma_words, lazily
from shardwright.orchestrator.config.config import output_folder, words_of
from shardwright.orchestrator.config.job_flags import (
    add_job_flags,
    add_job_verb,
    add_source_flag,
    imported_job,
)
from shardwright.orchestrator.environment import reading
from shardwright.orchestrator.host import collect_rarely
from shardwright.orchestrator.report import commands as reports
from shardwright.orchestrator.report import explanations
from shardwright.orchestrator.runtime import commands as runtime
from shardwright.orchestrator.saved import commands as saved
from shardwright.orchestrator.service import logs
from shardwright.orchestrator.submission import commands as submission
from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.terminal.age import FLAG, again
from shardwright.orchestrator.terminal.terminal import adapt, say
from shardwright.orchestrator.triton import commands as triton
from shardwright.orchestrator.values import commands as values
from shardwright.orchestrator.whatif import commands as whatif

_FRAMEWORKS = ("xla", *map(str.lower, NAMES))
_DEBUG = "--debug"  # in front of a verb


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    adapt(sys.stdout, sys.stderr)
    words = list(sys.argv[1:] if argv is None else argv)
    is_debugged = words[:1] == [_DEBUG]
    words = words[is_debugged:]
    args = argparse.Namespace(json="--json" in words)  # until they are understood
    # As in workers and value runs (`service/process_backend.py`); read when NumPy is loaded, which
    # no verb has done yet.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, _interrupt)
    collect_rarely()
    logs.start()
    try:
        args = _asked(words)
        code: int = args.verb(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        say("interrupted; finished units are kept in the cache", err=True)
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:
        return _failed(error, getattr(args, "json", False), is_debugged)


def _asked(words: Sequence[str]) -> argparse.Namespace:
    """What the words ask for. Raises UsageError for what they do not say."""
    began = time.perf_counter()
    verb, rest = split_verb(words, ("compile",))
    compiles = lazily("compile.compile_command", "main", "words")
    args = argparse.Namespace(verb=compiles, words=rest) if verb else _parser().parse_args(words)
    args.began, args.again = began, again(words)
    if getattr(args, "dump_dir", "") is None and (debug := reading.debug_folder()):
        say(f"NEURON_FRAMEWORK_DEBUG=1 from the environment: --dump-dir {debug}", err=True)
        args.dump_dir = Path(debug)
    return args


def _failed(error: Exception, as_json: bool, is_debugged: bool) -> int:
    """Say in one message what a command ended with; returns the exit code. The traceback is for
    `--debug` and for the log."""
    # Of a place that no flag names, stdout or the folder of temporary files among them.
    refused = outputs.of_the_disk(error, "standard output", "the command")
    shown = refused or told(error)
    if is_debugged or logs.is_on():
        notes = getattr(shown, "__notes__", [])
        trace = "\n".join([*notes, "".join(traceback.format_exception(error))])
        logs.tell("command.failed", code=shown.code, trace=trace)
        if is_debugged:
            say(trace, err=True)
    if as_json and not refused:
        say(json.dumps({"error": shown.diagnostic.as_dict()}))
    else:
        say(shown.diagnostic.render(), err=True)
    return shown.exit_code


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Version(argparse.Action):
    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        """Print the versions of everything that shapes a compiled file, and leave."""
        from shardwright.orchestrator.compile.compile_command import version_text

        say(version_text())
        parser.exit(0)


def _parser() -> Parser:
    parser = Parser(
        prog="shardwright",
        description="Shard, compile and simulate a Trainium training step without the hardware.",
    )
    parser.add_argument(
        _DEBUG, action="store_true", help="in front of VERB: tracebacks of errors, on stderr"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="versions that matter")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("compile", help="compile HLO or StableHLO files with neuronx-cc's own flags")
    run = verbs.add_parser("run", help="partition, compile, run values, time and report a job")
    run.add_argument("jobs", type=Path, nargs="*", metavar="JOB", help="job.toml (optional)")
    run.add_argument(
        "--compile-only", action="store_true", help="NEFFs of one job or many; no values, no times"
    )
    add_source_flag(run)
    add_job_flags(run)
    _answer_flags(run)
    run.set_defaults(verb=_run)
    plan = add_job_verb(verbs, "plan", "does it fit, how fast, where does the time go; no values")
    _answer_flags(plan)
    plan.add_argument("--trace", type=Path, help="write a Perfetto trace of the step here")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page here")
    plan.set_defaults(verb=_plan)
    validate = verbs.add_parser("validate", help="predict published measurements")
    validate.add_argument("--training", type=Path, help="CSV of published training runs")
    validate.add_argument("--kernels", type=Path, help="CSV of published kernel times")
    validate.add_argument("--collectives", type=Path, help="CSV of published collective times")
    validate.add_argument(
        "--rows", default="", help="ids of training runs, or layouts: one of each; default: all"
    )
    validate.add_argument(
        "--fit", action="store_true", help="refit the constants of sim_cluster/calibration.toml"
    )
    validate.add_argument(FLAG, action="store_true", help="ask anew: nothing stored is an answer")
    validate.json_flag()
    validate.set_defaults(verb=_validate)
    unit = verbs.add_parser("unit", help="run one failed unit of a job again, here and alone")
    unit.add_argument("file", type=Path, help="the file that the failure names")
    unit.set_defaults(verb=lazily("service.unit_command", "main", "file"))
    whatif.add_verbs(verbs)
    _table_parsers(verbs)
    _opt_parser(verbs)
    _nccom_parser(verbs)
    _neff_parsers(verbs)
    for room in (saved, triton, reports, submission, cache, values, runtime, doctor):
        room.add_verbs(verbs)
    return parser


def _table_parsers(verbs: Any) -> None:
    operators = verbs.add_parser("list-operators", help="operators a model may contain")
    operators.add_argument("--framework", type=str.lower, choices=_FRAMEWORKS, default="xla")
    operators.add_argument(
        "--compiler-version-profile", default="own", help="those of a neuronx-cc release"
    )
    operators.add_argument("--target", default=FIRST_TARGET, help="those of its compiler")
    operators.set_defaults(verb=_list_operators)
    alias = verbs.add_parser("alias", help="neuronx-cc and neuron_parallel_compile by their names")
    alias.add_argument("folder", type=Path, metavar="DIR", help="where their scripts are written")
    alias.set_defaults(verb=lazily("commands.alias", "run", "folder"))
    check = verbs.add_parser(
        "check-model", help="count the operators of model files that are supported, by type"
    )
    check.add_argument("files", type=Path, nargs="+", metavar="FILE", help="XLA, ONNX or MXNet")
    check.add_argument("--target", default=FIRST_TARGET, help="for its compiler")
    check.json_flag()
    check.set_defaults(verb=lazily("commands.check_model", "run", "files", "target", "json"))
    errors = verbs.add_parser("errors", help="what an error code means and what to do")
    errors.add_argument("code", nargs="?", default="", help="for example NCC_EVRF035")
    errors.json_flag()
    errors.set_defaults(verb=lazily("commands.errors", "run", "code", "json"))


def _opt_parser(verbs: Any) -> None:
    opt = verbs.add_parser("opt", help="run one pass, or some, on the text of a graph")
    opt.add_argument(
        "file", nargs="?", default="", help="text of a graph (docs/text-forms.md), or -"
    )
    opt.add_argument("--pass", dest="passes", default="", metavar="NAME[,NAME]", help="in order")
    opt.add_argument("--list", action="store_true", help="every pass, its settings, what it does")
    opt.add_argument("--output", "-o", type=Path, help="write here; default: standard output")
    opt.set_defaults(verb=lazily("opt.command", "run", "list", "file", "passes", "output"))


def _nccom_parser(verbs: Any) -> None:
    nccom = verbs.add_parser("nccom", help="time of a collective, in nccom-test's terms")
    nccom.add_argument(
        "op", help="allr, allg, allgv, redsct, alltoall, alltoallv, permute, sendrecv"
    )
    nccom.add_argument("-r", "--nworkers", type=int, required=True, help="ranks in all")
    nccom.add_argument("-N", "--nnodes", type=int, default=1, help="instances")
    nccom.add_argument(
        "-b", "--minbytes", default="32M", help="smallest size, for example 8 or 1kb"
    )
    nccom.add_argument("-e", "--maxbytes", default="", help="largest size; default: the smallest")
    nccom.add_argument("-i", "--stepbytes", default="", help="from one size to the next")
    nccom.add_argument("-f", "--stepfactor", default="", help="each size as so many times the last")
    nccom.add_argument("-d", "--datatype", default="uint8", help="uint8, bf16, fp32, ...")
    nccom.add_argument(
        "--custom-replica-groups", default="", metavar="JSON", help="groups of ranks"
    )
    nccom.add_argument("--custom-src-target-pairs", default="", metavar="JSON", help="of a permute")
    what = "instance type or family, or a JSON file"
    nccom.add_argument("--target", type=machine_name, default=FIRST_TARGET, help=what)
    nccom.add_argument("--lnc", type=int, default=0, help="physical cores per rank: 1 or 2")
    nccom.add_argument("--profile", choices=words_of("cluster.profile"), default="nominal")
    nccom.add_argument("--runtime", default="current", help="of a release: 2023, 2024 or current")
    nccom.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="thresholds"
    )
    nccom.add_argument("--report-to-json-file", default="", metavar="FILE")
    nccom.add_argument("--csv", default="", metavar="FILE", help="write the table as CSV")
    nccom.json_flag()
    nccom.add_argument("--plot", action="store_true", help="draw time over size")
    nccom.add_argument("--explain", action="store_true", help="why every algorithm was chosen")
    _nccom_run_flags(nccom)
    nccom.set_defaults(verb=_nccom)


def _nccom_run_flags(nccom: Parser) -> None:
    """What nccom-test is told of its own run: repetitions, data, hosts, columns."""
    counts = (
        ("-n", "--iters", 20, "operations that are measured"),
        ("-w", "--warmup_iters", 5, "operations before them"),
        ("-I", "--neff_iters", 0, "times that all of them are run"),
        ("-W", "--neff_warmup_iters", 0, "times that all of them are run before"),
    )
    for short, name, default, what in counts:
        nccom.add_argument(short, name, type=int, default=default, help=what)
    nccom.add_argument(
        "-c", "--check", nargs="?", const="random", default="", help="values: random or all_ones"
    )
    nccom.add_argument("--seed", type=int, default=0, help="of random data; 0 where not given")
    nccom.add_argument(
        "-t", "--stats", nargs="+", default=[], metavar="NAME", help="columns: avg, min, max, p50"
    )
    nccom.add_argument("--show-input-output-size", action="store_true", help="columns of both")
    nccom.add_argument(
        "--data-parallel-dimension", type=int, default=0, metavar="N", help="groups of N ranks"
    )
    nccom.add_argument(
        "--alltoallv-metadata", default="", metavar="JSON", help="counts of an alltoallv"
    )
    nccom.add_argument("-s", "--hosts", nargs="+", default=[], help="one per instance")
    nccom.add_argument("--hosts-file", default="", metavar="FILE", help="hosts, one a line")
    nccom.add_argument("-S", "--slurm-mode", action="store_true", help="hosts of an allocation")
    nccom.add_argument("--slurm-job-id", default="", metavar="ID", help="the allocation")


def _answer_flags(parser: Parser) -> None:
    parser.json_flag("report.json")
    parser.add_argument(
        "--dump-dir",
        "--dump_dir",
        type=Path,
        metavar="DIR",
        help="every stage as text, numbered and named, with a README.txt that says what is what",
    )
    parser.add_argument(
        "--explain",
        nargs="+",
        default=[],
        metavar=("WHAT", "TENSOR"),
        help=explanations.help_text(),
    )


def _neff_parsers(verbs: Any) -> None:
    neff = verbs.add_parser("neff", help="inspect, check and run compiled files")
    tools = neff.add_subparsers(required=True, metavar="TOOL")
    info = tools.add_parser("info", help="what a file holds")
    info.add_argument("file", type=Path)
    info.add_argument("--json", action="store_true")
    info.set_defaults(verb=lazily("neff.neff_tools", "info", "file", "json"))
    verify = tools.add_parser("verify", help="check every checksum, limit and digest")
    verify.add_argument("file", type=Path, help="a .neff file or a bundle directory")
    verify.set_defaults(verb=lazily("neff.neff_tools", "verify", "file"))
    _neff_run_parser(tools)
    _neff_text_parsers(tools)
    export = tools.add_parser("export", help="one core of a bundle as a single file")
    export.add_argument("bundle", type=Path, help="a bundle directory")
    export.add_argument("--core", type=int, default=0)
    export.add_argument("--output", type=Path, default=Path("file.neff"))
    export.set_defaults(verb=lazily("neff.neff_files", "export", "bundle", "core", "output"))


def _neff_run_parser(tools: Any) -> None:
    run = tools.add_parser("run", help="run one compiled program on one core")
    run.add_argument("file", type=Path)
    run.add_argument(
        "--inputs",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=".npz with arg0, arg1, ..., or the outputs of another program; the last one counts",
    )
    run.add_argument("--outputs", type=Path, help=".npz to write: out0, out1, ...")
    run.add_argument("--level", choices=("L0", "L1"), default="L1")
    run.add_argument(
        "--time",
        dest="timed",
        action="store_true",
        help="print the simulated time; alone, or with values",
    )
    run.add_argument("--target", default="", help="machine; default: the one it was made for")
    run.add_argument(
        "--stochastic-rounding",
        dest="seed",
        type=int,
        metavar="SEED",
        help="round stochastically, drawing from",
    )
    run.add_argument(
        "--strict-indices", action="store_true", help="an index out of bounds is an error"
    )
    run.add_argument(
        "--iterations", type=int, default=1, metavar="N", help="of --time: mean, min, max"
    )
    run.add_argument("--warmup", type=int, default=0, metavar="N", help="executions before them")
    run.add_argument(
        "--jitter", type=float, default=0.0, help="mean delay of code, part of its time"
    )
    run.add_argument(
        "--dump-inputs", type=Path, metavar="DIR", help="leave inputs here when it fails"
    )
    _program_flag(run)
    run.set_defaults(verb=_neff_run)


def _neff_text_parsers(tools: Any) -> None:
    dump = tools.add_parser("dump", help="calls, kernels and the instructions of every engine")
    dump.add_argument("file", type=Path)
    dump.add_argument("--function", default="", help="only this one")
    dump.add_argument(
        "--engine", action="append", default=[], choices=_ENGINES, help="only these queues"
    )
    _program_flag(dump)
    names = ("file", "program", "function", "engine")
    dump.set_defaults(verb=lazily("neff.neff_text", "dump", *names))
    diff = tools.add_parser("diff", help="how two programs differ; exit code 1 when they do")
    diff.add_argument("first", type=Path)
    diff.add_argument("second", type=Path)
    _program_flag(diff)
    diff.set_defaults(verb=lazily("neff.neff_text", "diff", "first", "second", "program"))
    unpack = tools.add_parser("unpack", help="a program as a folder: def.json, a file per engine")
    unpack.add_argument("file", type=Path)
    unpack.add_argument("out", type=Path, metavar="DIR")
    _program_flag(unpack)
    unpack.set_defaults(verb=lazily("neff.neff_unpack", "unpack", "file", "out", "program"))


_ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma_in", "dma_out")


def _program_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--program", default="", help="which one, where a file holds several")


def _run(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.service.progress import Progress

    if args.compile_only:
        return submission.compile_only(args)
    explanations.check(args.explain)
    args.job = submission.only(args.jobs, args.compile_only)
    asked, found = imported_job(args)
    with Progress("quiet" if args.json else asked.run.progress) as progress:
        progress.say("loads the compiler")  # a second, and several on a busy host
        from shardwright.orchestrator.report import screen
        from shardwright.orchestrator.road import job

        report = job.run_job(asked, progress, args.dump_dir, source=found)
    report["provenance"]["again"] = args.again
    explanations.add(args.explain, asked, report)
    explanations.show(args.explain, report, args.json, screen.run_screen)
    return job.exit_code(report)


def _plan(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.report import plan_screen
    from shardwright.orchestrator.road import plan_cache
    from shardwright.orchestrator.service.progress import Progress
    from shardwright.orchestrator.whatif import advised

    explanations.check(args.explain)
    asked, found = imported_job(args)
    folder = output_folder(asked) if getattr(args, "output.dir") else None
    with outputs.held(folder) if folder else nullcontext():
        with Progress("quiet" if args.json else asked.run.progress, elsewhere="quiet") as progress:
            report = advised.with_tries(asked, args.trace, progress, args.dump_dir)
        waited_s = round(time.perf_counter() - args.began, 3)
        report["provenance"] |= {"again": args.again, "answered_s": waited_s}
        if found:
            report["imported"] = found.section(report["findings"])
        if folder:
            from shardwright.orchestrator.report.page.page import write_report

            write_report(report, folder)
    if args.html:
        from shardwright.orchestrator.report.page.page import report_page

        outputs.write(args.html, report_page(report), "--html")
    explanations.add(args.explain, asked, report)
    explanations.show(args.explain, report, args.json, plan_screen.plan_screen)
    return plan_cache.exit_code(report)


def _validate(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.validation import validate

    rows = tuple(comma_words(args.rows))
    return validate.run(asked_of(validate.Asked, args, rows=rows, as_json=args.json))


def _list_operators(args: argparse.Namespace) -> int:
    from shardwright.compiler.frontend.coverage import framework_names, operator_names
    from shardwright.compiler.surface.releases import profile
    from shardwright.compiler.surface.resolve import find_target

    compiler = find_target(args.target).core.compiler
    if args.framework != "xla":
        names = framework_names(args.framework, compiler)
    else:
        names = operator_names(profile(args.compiler_version_profile), compiler)
    say("\n".join(names))
    return 0


def _nccom(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.commands import nccom

    return nccom.run(args)


def _neff_run(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.neff import neff_tools

    options = asked_of(neff_tools.RunOptions, args)
    return neff_tools.run(args.file, args.inputs, args.outputs, options)


if __name__ == "__main__":
    sys.exit(main())
