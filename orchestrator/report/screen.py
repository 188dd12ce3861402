"""What a person sees at the end of `run`: one screen. All numbers come from the report; what is
seen while a job runs is `progress.py`'s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.inference import scalar
from shardwright.orchestrator.report.plan_screen import ANSWERED, ASKED, WIDTH, screen_lines
from shardwright.orchestrator.report.sections import Said, What
from shardwright.orchestrator.report.text import Facts, Report
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.text_plots import lines

_UNITS_PER_LINE = 3


def run_screen(report: Report) -> None:
    """The screen at the end of `run`."""
    console = terminal.console()
    _print(console, _failure(report))
    for line in sections.headline(report, console.width):
        console.print(line, soft_wrap=True)
    for part in ASKED:
        _print(console, part.section(report))
    _units(console, report)
    _print(console, sections.stored_units(report))
    losses = report["numerics"]["losses"]
    if len(losses) > 1:
        console.print(loss_plot(losses, scalar(report)))
    _print(console, _values(report))
    for part in ANSWERED:
        _print(console, part.section(report))
    console.print(Text.assemble(("what this cannot tell you", "bold"), " (report.json says more)"))
    unsaid = ", ".join(one["short"] for one in report["limits"]["cannot_tell"])
    _print(console, [("", unsaid)])
    _print(console, sections.findings(report))
    for name, path in report["provenance"]["files"].items():
        _print(console, [("files" if name == "bundle" else "", f"{name} {path}")])
    _print(console, sections.verdict(report))


def report_lines(report: Report) -> list[str]:
    """A report in plain text: what is wrong with the values of a run, what they came to, and the
    screen of a plan, whose last lines decide."""
    lines = screen_lines(report, WIDTH)
    if "numerics" in report:
        lines = [*sections.laid(chain(_failure(report), _values(report)), WIDTH), *lines]
    return [terminal.printable(line.plain.rstrip()) for line in lines]


def _failure(report: Report) -> Said:
    """What is wrong with the values of a run that failed; nothing for one that passed."""
    numerics = report["numerics"]
    if numerics["passed"]:
        return
    yield "error", "SW_VALUES: the values of this run are not those of the unsharded step"
    if (parts := numerics["parts"]) is not None:
        yield (
            "",
            f"the step is no mean over its samples: the loss of the whole batch is"
            f" {parts['loss']:.6g}, the mean of its {parts['count']} micro-batches'"
            f" {parts['mean_loss']:.6g} ({parts['place']}), and gradients are accumulated as means."
            f"{_drawn(report)} Make the loss a mean over samples, or take one micro-batch"
            " (strategy.micro_batch)",
        )
    for found, what, cure in _judged(numerics, scalar(report)):
        if found["error"] is None or not found["error"] <= found["allowed"]:
            yield "", f"{what} {_apart(found)}: {cure}"
    if report["job"]["compiler"]["auto_cast"] != "none":
        yield "", "run it with compiler.auto_cast = none to see whether the cast does that"


def _drawn(report: Report) -> str:
    """That a step with keys of its own draws other numbers for a micro-batch; else nothing."""
    keys = [
        path for row in report["graph"]["roles"] if row["role"] == "rng" for path in row["paths"]
    ]
    if not keys:
        return ""
    return f" Random numbers drawn from {keys[0]} are others for a micro-batch than for all of it."


def _judged(numerics: Facts, name: str) -> Iterator[tuple[Facts, str, str]]:
    """What has passed or failed: the figures, its name, and what to look at when it failed."""
    loss, leaf = numerics["worst_loss"], numerics["worst_param_error"]
    if leaf is not None:
        cure = "see how it is sharded and its gradient reduced with --explain sharding"
        yield leaf, f"{leaf['leaf']} after one step", f"{cure} {leaf['leaf']}"
        cure = "if every leaf is right after one step, later steps read something old"
        yield loss, f"the {name} of {loss['step']}", cure
    if (level := numerics["worst_l0"]) is not None:
        where = f"{level['value']} of program {level['program']}, instructions against kernels,"
        yield level, where, "a defect of ours, please report it with the bundle"


def _print(console: Console, said: Iterable[tuple[str, What]]) -> None:
    for line in sections.laid(said, console.width):
        console.print(line, soft_wrap=True)


def _units(console: Console, report: Report) -> None:
    rows = report["units"]
    computed = sum(1 for r in rows if r["cache"] == "miss")
    note = f"{computed} run, {len(rows) - computed} from the cache"
    if not any(r["kind"] == "compile" and r["cache"] == "miss" for r in rows):
        note = f"nothing to compile, {note}"
    text = f"{report['neffs']} NEFFs from {len(rows)} {sections.TASKS}: {note}"
    _print(console, [("built", text)])
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for start in range(0, len(rows), _UNITS_PER_LINE):
        cells: list[str | Text] = []
        for row in rows[start : start + _UNITS_PER_LINE]:
            name = "partition" if row["kind"] == "partition" else row["name"]
            worker = Text(row["worker"].split(":")[0], "dim")
            cells += [name, worker, f"{row['seconds']:.2f}s "]
        table.add_row(*cells)
    console.print(table)


def _values(report: Report) -> Said:
    """Losses, and how far they and the state are from the unsharded run's."""
    numerics = report["numerics"]
    losses = numerics["losses"]
    name, count = scalar(report), numerics["steps"]
    steps = "1 step" if count == 1 and name == "score" else f"{count} steps"
    yield "values", f"{name} {losses[0]:.4f} -> {losses[-1]:.4f} in {steps}"
    leaf, loss = numerics["worst_param_error"], numerics["worst_loss"]
    if leaf is None:
        yield "", "not compared with the unsharded step (run.compare)"
    else:
        yield "", f"from the unsharded run: {name} of {loss['step']} {_apart(loss)}"
        yield "", f"worst leaf after one step {_apart(leaf)}: {leaf['leaf']}"
        if draws := numerics["rounding"]:
            yield (
                "",
                f"more than {numerics['bound']:.0e} is allowed where rounding alone does a"
                f" {draws['times']}th of it to the unsharded step, in one of {draws['samples']}"
                " draws",
            )
        if lost := numerics["undecided"]:
            few = sections.first_few(lost)
            yield "", f"no digits to compare, rounding alone changes all of {few}"
    if (worst := numerics["worst_l0"]) is not None:
        yield "", f"instructions (L0) from kernels (L1): {_apart(worst)}"


def _apart(found: Facts) -> str:
    error = found.get("note") or f"{found['error']:.1e}"
    return f"{error}, allowed {found['allowed']:.1e}"


def loss_plot(losses: list[float], name: str = "loss") -> Text:
    """The curve of the losses as text."""
    return lines({name: (range(1, len(losses) + 1), losses)}, "step", name)
