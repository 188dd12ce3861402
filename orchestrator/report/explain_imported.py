"""`--explain imported`: what became of every field of another project's configuration."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import Facts, Report
from shardwright.orchestrator.terminal import terminal


def explain(_job: JobConfig, report: Report) -> Facts:
    """The section of the report. Raises UsageError for a job that is not imported."""
    if "imported" not in report:
        raise UsageError(
            "SW_USAGE",
            "--explain imported requires a job of another project, got none",
            hint="shardwright plan --from PROJECT FILE --explain imported",
        )
    section: Facts = report["imported"]
    return section


def field_rows(section: Facts) -> list[tuple[int, str, str, str]]:
    """Line, field, value and what it is here, of every field in the order of the file."""
    rows = [(row, f"{row['means']}") for row in section["read"]]
    rows += [(row, f"nothing: {row['why']}") for row in section["without"]]
    rows += [(row, "unknown") for row in section["unknown"]]
    told = [(row["line"], row["field"], row["value"], here) for row, here in rows]
    return sorted(told, key=lambda row: row[0])


def show(section: Facts) -> None:
    """Every field in a table, and every assumption below it."""
    console = terminal.console()
    if section.get("terms"):
        show_terms(section["terms"])
        return
    table = terminal.table("line", "field", "value", "here", title="fields", right=("line",))
    for line, *cells in field_rows(section):
        table.add_row(f"{line}", *cells)
    console.print(table)
    for sentence in section["assumed"]:
        console.print(f"assumed: {sentence}")


def show_terms(terms: Sequence[Facts]) -> None:
    """What was said and what is done, side by side."""
    console = terminal.console()
    table = terminal.table("term", "said", "here", title="terms")
    for row in terms:
        at = f"{row['file']}:{row['line']}" if row["line"] else row["file"]
        here = f"{row['done']}\ndiffers: {row['why']}" if row["why"] else row["done"]
        table.add_row(f"{row['term']}\n{at}".rstrip(), row["said"], here)
    console.print(table)
