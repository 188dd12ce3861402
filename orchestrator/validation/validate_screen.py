"""The report of `validate` on a terminal: a table per kind of measurement, medians below each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from shardwright.orchestrator.report.text import Facts, Report, seconds_text
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.age import counted_text

_WORST_SHOWN = 10


def show(report: Report, again: str) -> None:
    """Print a report of `validate.run`; `again` is the command that asks anew."""
    console = terminal.console()
    if found := report.get("training"):
        _training(console, found)
        counts = found["stored"], found["predictions"]
        if text := counted_text(*counts, "predictions", found["stored_s"], again):
            console.print(text, soft_wrap=True)
    for name in ("kernels", "collectives"):
        if name in report:
            _measured(console, name, report[name])


def _table(*names: str) -> Table:
    right = set(names) - {"row", "group"}
    padding = (0, 2, 0, 0)
    return terminal.table(
        *names, right=right, no_wrap=True, box=None, padding=padding, header_style="dim"
    )


def _training(console: Console, report: Report) -> None:
    table = _table("row", "predicted", "band", "published", "error", "left out", "const. MFU")
    made = [row for row in report["rows"] if row["error"] is not None]
    for row in made:
        low, high = row["band_s"]
        left = row["left_out_error"]
        table.add_row(
            row["id"],
            seconds_text(row["predicted_step_time_s"]),
            f"{low:.4g} .. {high:.4g} s",
            seconds_text(row["published_step_time_s"]),
            f"{row['error']:+.1%}",
            "" if left is None else f"{left:+.1%}",
            f"{row['baseline_error']:+.0%}",
        )
    console.print(table)
    for row in made if len(made) <= _WORST_SHOWN else ():
        console.print(
            f"{row['id']}  {row['model']}, {row['layout']} on {row['cores']} cores,"
            f" settings {row['settings']}"
        )
        console.print(f"      step: {_percents(row['shares'])}")
        console.print(f"      core: {_percents(row['busy'])}")
    _refused(console, report["rows"])
    if made:
        _training_notes(console, report)


def _training_notes(console: Console, report: Report) -> None:
    console.print(
        f"median error {report['median_error']:.1%}, worst {report['max_error']:.1%};"
        f" a constant MFU of {report['baseline_mfu']:.1%} fitted on the same rows"
        f" {report['baseline_median_error']:.1%}; band covers {report['band_covers']:.0%}"
    )
    if primary := report.get("primary"):
        console.print(
            f"primary rows: median {primary['median_error']:.1%}, one group left out"
            f" {primary['leave_one_group_out_median_error']:.1%}, worst"
            f" {primary['leave_one_group_out_max_error']:.1%}"
        )


def _measured(console: Console, name: str, report: Report) -> None:
    table = _table("row", "group", "predicted us", "published us", "error")
    for row in report["rows"]:
        if row["error"] is not None:
            figures = (f"{row['predicted_us']:.1f}", f"{row['published_us']:.1f}")
            table.add_row(row["id"], row["group"], *figures, f"{row['error']:+.1%}")
    console.print(table)
    _refused(console, report["rows"])
    if report["median_error"] is not None:
        console.print(
            f"{name}: median error {report['median_error']:.1%}, worst {report['max_error']:.1%}"
        )


def _refused(console: Console, rows: Sequence[Facts]) -> None:
    for row in rows:
        if row["error"] is None:
            console.print(f"{row['id']}  not predicted: {row['reason']}")


def _percents(shares: Mapping[str, float]) -> str:
    largest = sorted(shares.items(), key=lambda pair: -pair[1])
    return "  ".join(f"{name} {share:.1%}" for name, share in largest if share >= 0.0005)
