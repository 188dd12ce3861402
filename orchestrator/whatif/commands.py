"""The verbs of what-ifs: `sweep` and `scale`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import machine_name
from shardwright.orchestrator.changes.change import compared
from shardwright.orchestrator.config.arguments import comma_words
from shardwright.orchestrator.config.config import JobConfig, output_folder
from shardwright.orchestrator.config.job_flags import add_job_verb, imported_job, job_config
from shardwright.orchestrator.report.tried import FITS, REFUSED
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.outputs import prepare, writing
from shardwright.orchestrator.terminal.terminal import say, say_json

if TYPE_CHECKING:
    from shardwright.orchestrator.service.progress import Progress
    from shardwright.orchestrator.whatif.points import Point
    from shardwright.orchestrator.whatif.rows import Row
    from shardwright.orchestrator.whatif.sweep import Swept

_INSTANCES = "1,2,4,8,16,32,64"
_OBJECTIVES = {
    "tokens": "tokens_per_s",
    "time": "step_time_s",
    "cost": "usd_per_1e6_tokens",
    "memory": "peak_gib",
    "mfu": "mfu",
    "exposed": "exposed",
}


def add_verbs(verbs: Any) -> None:
    """`sweep` and `scale`."""
    sweep = add_job_verb(verbs, "sweep", "a grid of what-ifs: time, memory and cost of each")
    sweep.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=V,V,...",
        help="a key of the job, or a flag's name, and its values (';' between values with commas)",
    )
    sweep.add_argument("--points", type=Path, metavar="FILE", help="a list: .csv or .jsonl")
    sweep.add_argument(
        "--objective", choices=tuple(_OBJECTIVES), default="tokens", help="what is best"
    )
    sweep.add_argument("--sort", choices=tuple(_OBJECTIVES), help="default: the objective")
    sweep.add_argument("--limit", type=int, default=20, help="rows of the table; 0: all")
    sweep.json_flag("sweep.json")
    sweep.set_defaults(verb=_sweep)
    # --instances is a list here.
    what = "weak and strong scaling, machines side by side"
    scale = add_job_verb(verbs, "scale", what, own=("mode",))
    scale.add_argument("--targets", default="", help="machines, comma-separated")
    scale.add_argument("--mode", choices=("weak", "strong", "both"), default="both")
    scale.add_argument(
        "--most-shards", type=int, help="ranks that share a copy of the state; 0: all of them"
    )
    scale.json_flag("scale.json")
    scale.set_defaults(verb=_scale)


def _sweep(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.whatif import pictures, table
    from shardwright.orchestrator.whatif.points import points
    from shardwright.orchestrator.whatif.rows import METRICS, ordered

    host = _host(args)
    asked = points(args.vary, args.points, lambda keys: compared(job_config(args, keys)))
    varied = list(dict.fromkeys(name for point in asked for name in point.values))
    folder, swept = _swept(args, host, asked)
    objective = METRICS[_OBJECTIVES[args.objective]]
    data = table.document(swept, objective, varied)
    rows = ordered(swept.rows, objective)
    written = []
    if not swept.interrupted:  # who interrupts wants an end, and the rows are kept
        with writing(folder):
            written = table.write_files(folder, "sweep", data, rows)
            written += pictures.write(folder, rows, objective, varied)
    if args.json:
        say_json(data)
    else:
        console = terminal.console()
        sort = METRICS[_OBJECTIVES[args.sort or args.objective]]
        table.show(console, swept, sort, varied, args.limit if args.limit > 0 else len(asked))
        table.show_bought(console, swept)
        pictures.show(console, rows)
        _tell_rest(swept, written, args.again)
    return _exit_code(swept)


def _scale(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.whatif import scale, scale_screen, table

    counts = _counts(getattr(args, "cluster.instances"))
    setattr(args, "cluster.instances", None)
    machines = list(dict.fromkeys(map(machine_name, comma_words(args.targets))))
    if len(machines) == 1:  # which a price without a name is for
        setattr(args, "cluster.target", machines[0])
    host = _host(args)
    study = scale.Study(
        targets=machines or [host.cluster.target],
        instances=counts,
        modes=scale.MODES if args.mode == "both" else (args.mode,),
        most_shards=scale.MOST_SHARDS if args.most_shards is None else args.most_shards,
    )
    asked = scale.points(study, host, lambda keys: compared(job_config(args, keys)))
    folder, swept = _swept(args, host, asked)
    found = scale.curves(swept.rows)
    data = scale_screen.document(found, swept)
    written = []
    if not swept.interrupted:
        with writing(folder):
            written = table.write_files(folder, "scale", data, scale_screen.all_rows(found))
            written += scale_screen.write_plots(folder, found)
    if args.json:
        say_json(data)
    else:
        console = terminal.console()
        scale_screen.show(console, found, host)
        table.show_bought(console, swept)
        scale_screen.show_plot(console, found)
        _tell_rest(swept, written, args.again)
    return _exit_code(swept)


def _host(args: argparse.Namespace) -> JobConfig:
    """The job that is varied; of an imported one it is said where the file's fields are told."""
    asked, found = imported_job(args)
    if found:
        read, rest = len(found.reading.fields), len(found.reading.unknown)
        again = f"plan --from {found.project} {found.reading.path}"
        say(
            f"from {found.project}: {read} fields read, {rest} unknown; {again} says what is"
            " assumed",
            err=True,
        )
    return compared(asked)


def _counts(text: str | None) -> list[int]:
    """Numbers of instances. Raises UsageError."""
    words = comma_words(text or _INSTANCES)
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError("SW_USAGE", f"--instances requires numbers, as in 1,2,4, got {text!r}")
    return sorted({int(word) for word in words})


def _swept(args: argparse.Namespace, host: JobConfig, asked: Sequence[Point]) -> tuple[Path, Swept]:
    from shardwright.orchestrator.service.progress import Progress
    from shardwright.orchestrator.whatif.journal import Journal
    from shardwright.orchestrator.whatif.sweep import sweep

    folder = prepare(output_folder(host))
    with Progress("quiet" if args.json else host.run.progress) as progress:
        journal = Journal(folder / "points.jsonl")
        tell, begin = partial(_tell, progress), partial(progress.begin, "point")
        return folder, sweep(asked, host, journal, tell, begin)


def _tell_rest(swept: Swept, paths: Sequence[Path], command: str) -> None:
    if text := swept.stored_text(command):
        say(text)
    if paths:
        say(f"files in {paths[0].parent}: {', '.join(path.name for path in paths)}")


def _tell(progress: Progress, row: Row, done: int, total: int) -> None:
    from shardwright.orchestrator.whatif.rows import METRICS
    from shardwright.orchestrator.whatif.table import short_names

    short = short_names(list(row.values))
    values = " ".join(f"{short[name]}={value}" for name, value in row.values.items())
    came_to = f"{METRICS['step_time_s'].text(row)} s" if row.metrics else row.code
    progress.item("point", f"{values}: {came_to}", done, total, quick=row.status == REFUSED)


def _exit_code(swept: Swept) -> int:
    """130 when it was interrupted, 70 when no point could be planned, 71 when none fits."""
    if swept.interrupted:
        say("interrupted; points that are done are kept", err=True)
        return 130
    states = {row.status for row in swept.rows}
    return 0 if FITS in states else 70 if states == {REFUSED} else 71
