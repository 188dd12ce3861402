"""What changed between two reports: settings, the step by category, memory, collectives, findings,
cost.

Each side is a report, the output directory of a run, or a job file, which is planned. Everything is
plain data, so that the screen, `--json` and the page show the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.support.documents import parse_json, read_text
from shardwright.orchestrator.changes.change import compared
from shardwright.orchestrator.config import config
from shardwright.orchestrator.report.page.words import dollars, plain, ps_text
from shardwright.orchestrator.report.report import SCHEMA
from shardwright.orchestrator.report.resolved import resolved_job
from shardwright.orchestrator.report.shape import check_report
from shardwright.orchestrator.report.text import (
    Facts,
    Report,
    change_text,
    counted,
    mesh_text,
    rate_text,
    size_text,
)
from shardwright.orchestrator.report.tried import chosen_of
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.age import counted_text, oldest

_SECTIONS = ("job", "graph", "mesh", "batch", "memory", "timing", "collectives", "cost", "findings")
_NO_SETTINGS = ("output", "cache", "base", "mesh")  # the mesh has a table of its own


def read_report(path: Path) -> Report:
    """The report in a file, or `report.json` of a directory. Raises UsageError (SW_REPORT) for
    anything else."""
    file = path / "report.json" if path.is_dir() else path
    try:
        report = parse_json(read_text(file, named_by_user=True))
    except OSError as error:
        raise _refused(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise _refused(f"{file} is no JSON: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        got = report.get("schema") if isinstance(report, dict) else "none"
        raise _refused(f"a report requires schema {SCHEMA}, got {got} in {file}")
    if missing := [key for key in _SECTIONS if key not in report]:
        raise _refused(f"a report requires {', '.join(_SECTIONS)}, {file} lacks {missing[0]}")
    try:
        check_report(report)
    except ValueError as error:
        raise _refused(f"{file}: {error}") from error
    return report


def _refused(message: str) -> UsageError:
    return UsageError(
        "SW_REPORT", message, hint="give report.json of `run` or `plan --json`, or its directory"
    )


def side(path: Path, fresh: bool = False) -> Report:
    """The report of one side; a job file is planned, `fresh` without what is stored, and with
    what fits it best where the file does not say. Raises what reading and planning raise."""
    if path.suffix != ".toml":
        return read_report(path)
    from shardwright.orchestrator.road import plan_cache

    anew = ["cache.fresh=true"] if fresh else ()
    return plan_cache.plan(compared(config.load(path, anew)))


def compare(a: Report, b: Report) -> Facts:
    """What is different in `b`; quantities as `{name, a, b}`, everything else as lists."""
    return {
        "names": [title(a), title(b)],
        "stored_s": [r["provenance"].get("stored_s", 0.0) for r in (a, b)],
        "counted": " or ".join(dict.fromkeys((f"{counted(a)}s", f"{counted(b)}s"))),
        "settings": list(_settings(*_jobs(a, b))),
        "mesh": _both(a["mesh"], b["mesh"], 1),
        "summary": _summary(a, b),
        "time_ps": _both(a["timing"]["breakdown_ps"], b["timing"]["breakdown_ps"]),
        "memory_bytes": _both(a["memory"]["categories"], b["memory"]["categories"]),
        "collectives": _collectives(a, b),
        "findings": _findings(a, b),
    }


def _jobs(a: Report, b: Report) -> tuple[Report, Report]:
    """Both jobs with what was chosen, where both reports say that."""
    told = all("resolved" in report for report in (a, b))
    return (resolved_job(a), resolved_job(b)) if told else (a["job"], b["job"])


def title(report: Report) -> str:
    """A report in one line, with what was chosen for keys that its job leaves to the memory."""
    cluster = report["job"]["cluster"]
    machines = f"{cluster['instances']} x {cluster['target']}"
    name = f"{report['graph']['name']} {report['job']['strategy']['name']}"
    text = f"{name} {mesh_text(report)} on {machines}"
    chosen = chosen_of(report)
    return f"{text}, auto: {chosen}" if chosen else text


def _settings(a: Report, b: Report) -> Iterable[Facts]:
    for table in dict.fromkeys((*a, *b)):
        first, second = a.get(table, {}), b.get(table, {})
        if table in _NO_SETTINGS or not (isinstance(first, dict) and isinstance(second, dict)):
            continue
        for key in dict.fromkeys((*first, *second)):
            if first.get(key) != second.get(key):
                yield {"key": f"{table}.{key}", "a": first.get(key), "b": second.get(key)}


def _summary(a: Report, b: Report) -> Sequence[Facts]:
    rows = []
    for name, (section, _, _) in SUMMARY.items():
        first, second = ((report[section] if section else report)[name] for report in (a, b))
        rows.append({"name": name, "a": first, "b": second})
    if _basis(a) == _basis(b):
        return rows
    return [row | OTHER_PRICE if row["name"].startswith("usd") else row for row in rows]


OTHER_PRICE = {"why_not": "other kind of price"}


def _basis(report: Report) -> tuple[Any, ...]:
    """What has to be equal where dollars are compared."""
    price = report.get("price") or {}
    return price.get("kind"), price.get("given")


def _both(a: Mapping[str, int], b: Mapping[str, int], absent: int = 0) -> list[Facts]:
    """Amounts by name, those that are nothing in both left out."""
    rows = (
        {"name": name, "a": a.get(name, absent), "b": b.get(name, absent)}
        for name in dict.fromkeys((*a, *b))
    )
    return [row for row in rows if row["a"] != absent or row["b"] != absent]


def _collectives(a: Report, b: Report) -> list[Facts]:
    """Kinds of collectives over an axis in numbers, bytes and times, where they differ."""
    first, second = _by_kind(a["collectives"]), _by_kind(b["collectives"])
    none = dict.fromkeys(_MOVED, 0)
    return [
        {"name": name, "a": first.get(name, none), "b": second.get(name, none)}
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
    ]


_MOVED = ("count", "bytes", "time_ps", "exposed_ps")


def _by_kind(rows: Iterable[Facts]) -> Mapping[str, Mapping[str, int]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        own = {**row, "bytes": row["count"] * row["bytes"]}
        name = f"{row['kind']} {row['axis']} ({row['algorithm']})"
        found[name].update({key: own[key] for key in _MOVED})
    return found


def _findings(a: Report, b: Report) -> dict[str, list[str]]:
    first, second = (
        dict.fromkeys(f"{f['code']}: {f['message']}" for f in report["findings"])
        for report in (a, b)
    )
    return {
        "only_a": [text for text in first if text not in second],
        "only_b": [text for text in second if text not in first],
    }


SUMMARY: Mapping[str, tuple[str, str, Callable[[Any], str]]] = {
    "step_time_ps": ("timing", "step time", ps_text),
    "tokens_per_s": ("timing", "{} per second", "{:,.0f}".format),
    "mfu": ("timing", "MFU", rate_text),
    "hfu": ("timing", "HFU", rate_text),
    "peak_bytes": ("memory", "memory per core", size_text),
    "limit_bytes": ("memory", "memory limit", size_text),
    "usd_per_step": ("cost", "cost per step", dollars),
    "usd_per_1e6_tokens": ("cost", "cost per million {}", dollars),
    "cores": ("", "cores", "{:,}".format),
    "flops_per_step": ("graph", "FLOP per step", "{:.4g}".format),
    "params": ("graph", "parameters", "{:,}".format),
}
"""In which section of a report the quantities of the summary are, how they are named (`{}`: what is
counted) and written."""
_MANY = 10  # times as much; less is a percentage


def change(row: Facts) -> str:
    """How much more the second amount is, or why they cannot be compared."""
    if "why_not" in row:
        return str(row["why_not"])
    first, second = row["a"], row["b"]
    if first is None or second is None or first == second:
        return ""
    if not first:
        return "new"
    times = second / first
    return f"x {times:,.0f}" if times >= _MANY else change_text(times - 1)


Cells = tuple[str, ...]
Part = tuple[str, Cells, list[Cells]]
"""Caption, columns, rows."""


def tables(found: Facts) -> list[Part]:
    """Every part of a comparison as caption, columns and rows of text; parts without rows are left
    out."""
    columns = ("", "A", "B", "change")
    parts: list[Part] = [
        ("settings that differ", columns[:3], [_setting(row) for row in found["settings"]]),
        (
            "mesh",
            columns[:3],
            [_setting(r | {"key": r["name"]}) for r in found["mesh"] if r["a"] != r["b"]],
        ),
        ("summary", columns, [_summed(r, found["counted"]) for r in found["summary"]]),
        ("time of the step", columns, [_row(r, ps_text) for r in found["time_ps"]]),
        ("memory at the peak", columns, [_row(r, size_text) for r in found["memory_bytes"]]),
        ("collectives that differ: count, time, exposed", columns, _moved(found["collectives"])),
        ("findings of A alone", ("",), [(text,) for text in found["findings"]["only_a"]]),
        ("findings of B alone", ("",), [(text,) for text in found["findings"]["only_b"]]),
    ]
    return [part for part in parts if part[2]]


def _setting(row: Facts) -> Cells:
    return row["key"], plain(row["a"]), plain(row["b"])


def _summed(row: Facts, unit: str) -> Cells:
    _, name, text = SUMMARY[row["name"]]
    return _row({**row, "name": name.format(unit)}, text)


def _row(row: Facts, text: Callable[[Any], str]) -> Cells:
    return row["name"], text(row["a"]), text(row["b"]), change(row)


def _moved(rows: Iterable[Facts]) -> list[Cells]:
    def text(one: Mapping[str, int]) -> str:
        return f"{one['count']}, {ps_text(one['time_ps'])}, {ps_text(one['exposed_ps'])}"

    return [
        (
            row["name"],
            *(text(row[side]) for side in "ab"),
            change({side: row[side]["time_ps"] for side in "ab"}),
        )
        for row in rows
    ]


def print_comparison(found: Facts, again: str) -> None:
    """All tables on the terminal; `again` is the command that asks anew."""
    console = terminal.console()
    for letter, name in zip("AB", found["names"], strict=True):
        console.print(Text.assemble((letter, "bold"), f" {name}"), soft_wrap=True)
    times = [stored_s for stored_s in found["stored_s"] if stored_s]
    if text := counted_text(len(times), 2, "plans", oldest(times), again):
        console.print(text, soft_wrap=True)
    for caption, columns, rows in tables(found):
        table = terminal.table(
            *columns, title=caption, right=columns[1:], overflow="fold", box=None
        )
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
