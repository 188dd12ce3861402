"""`--explain time`: where every picosecond of a step goes, by function and by source line.

A view of the report's `functions`; both tables sum to the step exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from shardwright.compiler.machine.target import PS_PER_S
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import (
    Facts,
    Report,
    count_text,
    seconds_text,
    share_text,
    size_text,
)
from shardwright.orchestrator.terminal import terminal

CODE = ("compute", "memory")
NO_LINE = "(no line)"
_SHOWN = 25  # rows of a table on the terminal; `--json` has all
_LEAST = 5e-4  # of the step: less is 0.0 %


def explain(_job: JobConfig, report: Report) -> Facts:
    """`{step_time_ps, functions, lines}`, the longest first: a function with its own breakdown, a
    line with its engines, operations and bytes. What is no code is a line of its category."""
    functions = [{k: v for k, v in row.items() if k != "kernels"} for row in report["functions"]]
    lines = [*_code_lines(report), *_waits(report)]
    return {
        "step_time_ps": report["timing"]["step_time_ps"],
        "physical_cores": report["logical_cores"]["lnc"],
        "functions": functions,
        "lines": sorted(lines, key=lambda row: -row["time_ps"]),
    }


def _code_lines(report: Report) -> Iterator[Facts]:
    found: dict[str, dict[str, Any]] = {}
    for function in report["functions"]:
        left = sum(function["breakdown_ps"].get(category, 0) for category in CODE)
        for kernel in function["kernels"]:
            left -= kernel["time_ps"]
            _add(found, kernel)
        if left:  # of functions that are summed up in one row
            _add(found, {"loc": "", "time_ps": left, "busy_ps": {}, "flops": 0, "hbm_bytes": 0})
    for line, row in found.items():
        what = ", ".join(row.pop("names"))
        engines = dict(row["engines_ps"].most_common())
        yield {"line": line, "what": what} | row | {"engines_ps": engines}


def _add(found: dict[str, dict[str, Any]], kernel: Facts) -> None:
    empty = {"names": {}, "time_ps": 0, "engines_ps": Counter(), "flops": 0, "hbm_bytes": 0}
    row = found.setdefault(kernel["loc"] or NO_LINE, empty)
    row["names"][kernel.get("name", "other code")] = None
    row["engines_ps"].update(kernel["busy_ps"])
    for key in ("time_ps", "flops", "hbm_bytes"):
        row[key] += kernel[key]


def _waits(report: Report) -> Iterator[Facts]:
    for category, ps in report["timing"]["breakdown_ps"].items():
        if category not in CODE and ps:
            yield {"line": "", "what": category, "time_ps": ps} | {
                "engines_ps": {},
                "flops": 0,
                "hbm_bytes": 0,
            }


def show(section: Facts) -> None:
    """Both tables."""
    console = terminal.console()
    total = section["step_time_ps"]
    functions, lines = (
        [row for row in section[name] if row["time_ps"] >= _LEAST * total][:_SHOWN]
        for name in ("functions", "lines")
    )
    console.print(_functions(functions, total))
    console.print(_lines(lines, total, section["physical_cores"]))


def _functions(rows: list[Facts], total: int) -> Table:
    title = "where the step goes, by function"
    table = terminal.table("function", title=title, overflow="fold")
    for name in ("calls", "time", "of step", "compute", "memory", "waits"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        parts = row["breakdown_ps"]
        code = [parts.get(category, 0) for category in CODE]
        shares = (row["time_ps"], *code, row["time_ps"] - sum(code))
        table.add_row(
            "/".join(filter(None, (row["program"], row["function"]))),
            str(row["calls"]),
            seconds_text(row["time_ps"] / PS_PER_S),
            *(share_text(share, total, digits=1) for share in shares),
        )
    return table


def _lines(rows: list[Facts], total: int, cores: int) -> Table:
    """The busiest engine of a line is busy a share of the step, on all physical cores: beside the
    line's own time it may be more, since its work begins while the line before is still at work."""
    table = terminal.table("line", "what", title="by source line", overflow="fold")
    for name in ("of step", "busiest engine, of step", "FLOP", "HBM"):
        table.add_column(name, justify="right")
    for row in rows:
        engine, busy = next(iter(row["engines_ps"].items()), ("", 0))
        table.add_row(
            row["line"].rpartition("/")[2],
            row["what"],
            share_text(row["time_ps"], total, digits=1),
            f"{engine} {share_text(busy / cores, total, digits=1)}" if engine else "",
            count_text(row["flops"]) if row["flops"] else "",
            size_text(row["hbm_bytes"]) if row["hbm_bytes"] else "",
        )
    return table
