"""A sweep on the screen and in files: the table, CSV, JSON and, when pandas is there, Parquet."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.compiler.support.files import write_atomic
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.report.tried import FITS, REFUSED
from shardwright.orchestrator.terminal.strict_json import dumps
from shardwright.orchestrator.whatif.buyer import prices_text
from shardwright.orchestrator.whatif.rows import FITTED, METRICS, Metric, Row, ordered
from shardwright.orchestrator.whatif.sweep import Swept

SCHEMA = 1
_GOAL = ("days", "usd")
_SHOWN = ("step_time_s", "tokens_per_s", "mfu", "exposed", "peak_gib", "usd_per_1e6_tokens")
_SERVED = ("step_time_s", "tokens_per_s", "mbu", "mfu", "peak_gib", "usd_per_1e6_tokens")
_COLOURS = {FITS: "", REFUSED: "dim"}


def document(swept: Swept, objective: Metric, varied: Sequence[str]) -> Facts:
    """What `--json` prints and `sweep.json` holds."""
    return {
        "schema": SCHEMA,
        "varied": list(varied),
        "objective": objective.name,
        "interrupted": swept.interrupted,
        "prices": list(swept.prices),
        "goal": swept.goal,
        "points": [row.as_dict() for row in ordered(swept.rows, objective)],
    }


def write_files(folder: Path, name: str, data: Facts, rows: Sequence[Row]) -> list[Path]:
    """`NAME.json` with `data`, `NAME.csv` with the rows and, when pandas and pyarrow are there,
    `NAME.parquet`; what was written."""
    paths = [folder / f"{name}.json", folder / f"{name}.csv"]
    write_atomic(paths[0], dumps(data, indent=1).encode())
    flat = [row.flat() for row in rows]
    columns = list(dict.fromkeys(column for row in flat for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_atomic(paths[1], text.getvalue().encode())
    if all(importlib.util.find_spec(name) for name in ("pandas", "pyarrow")):
        paths.append(folder / f"{name}.parquet")
        _write_parquet(flat, columns, paths[-1])
    return paths


def _write_parquet(flat: Sequence[Facts], columns: Sequence[str], path: Path) -> None:
    """A column has one type: what a point sets is text, and the same figure of a plan a number."""
    import pandas

    frame = pandas.DataFrame(flat, columns=columns)
    for name in columns:
        if pandas.api.types.infer_dtype(frame[name], skipna=True).startswith("mixed"):
            try:
                frame[name] = pandas.to_numeric(frame[name])
            except ValueError:
                frame[name] = frame[name].map(str, na_action="ignore")
    frame.to_parquet(path, index=False)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names of keys without their table, where that says enough."""
    last = [name.rpartition(".")[2] for name in names]
    return {
        name: tail if last.count(tail) == 1 else name
        for name, tail in zip(names, last, strict=True)
    }


def show(console: Console, swept: Swept, sort: Metric, varied: Sequence[str], limit: int) -> None:
    """The table: best first, at most `limit` rows of it, and why points were refused."""
    rows = ordered(swept.rows, sort)
    differ, alike = _fitted(rows, varied)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in (*short_names(varied).values(), *differ):
        table.add_column(Text(name), overflow="fold")
    usual = _SERVED if any("mbu" in row.metrics for row in rows) else _SHOWN
    shown = (*usual, *(name for name in _GOAL if any(name in row.metrics for row in rows)))
    for name in shown:
        metric = METRICS[name]
        table.add_column(metric.title, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows[:limit]:
        values = [Text(row.values.get(name, "")) for name in varied]
        values += [Text(str(row.metrics.get(name, ""))) for name in differ]
        figures = [METRICS[name].text(row) for name in shown]
        table.add_row(*values, *figures, Text(_verdict(row)), style=_COLOURS.get(row.status, "red"))
    console.print(table)
    if any(row.metrics.get("over_gib") for row in rows[:limit]):
        console.print("+: does not fit, by so much per core")
    if len(rows) > limit:
        console.print(f"{len(rows) - limit} more rows in the files; --limit 0 shows all")
    if alike:
        which = "every point" if all(row.metrics for row in rows) else "every point with figures"
        console.print(f"{which}: {', '.join(f'{k} {v}' for k, v in alike.items())}")
    reasons(console, rows)


def _fitted(
    rows: Sequence[Row], varied: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, str | int]]:
    """Of what the memory may have decided: what differs among points, and what is alike in all of
    them; what is varied is neither."""
    own = {name.rpartition(".")[2].replace("-", "_") for name in varied}
    found = {
        name: {row.metrics[name]: None for row in rows if name in row.metrics}
        for name in FITTED
        if name not in own
    }
    alike = {name: next(iter(values)) for name, values in found.items() if len(values) == 1}
    return tuple(name for name, values in found.items() if len(values) > 1), alike


def show_bought(console: Console, swept: Swept) -> None:
    """At which prices points are compared, and which meets the goal."""
    if swept.prices:
        console.print(Text(f"prices: {prices_text(swept.prices)}"))
    for line in swept.goal["text"] if swept.goal else ():
        console.print(Text(line))


def _verdict(row: Row) -> str:
    over = row.metrics.get("over_gib")
    return f"+{over:.2f} GiB" if over and row.status != FITS else row.code


def reasons(console: Console, rows: Sequence[Row]) -> None:
    """Each code of a refusal once, with how often and one reason."""
    refused: dict[str, list[Row]] = {}
    for row in rows:
        if row.status == REFUSED:
            refused.setdefault(row.code, []).append(row)
    for code, found in refused.items():
        where = " ".join(f"{name}={value}" for name, value in found[0].values.items())
        console.print(Text(f"{code}: {len(found)} of {len(rows)} points, for example {where}:"))
        console.print(Text(f"  {found[0].reason.splitlines()[0]}"))
