"""Pages from reports: `report.html` of one, `compare.html` of two.

Names of models, findings and paths are untrusted text: templates escape everything. A page is
written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.model import OF_TRAINING
from shardwright.orchestrator.report import goal, sections, text
from shardwright.orchestrator.report.explain_imported import field_rows
from shardwright.orchestrator.report.inference import result_text, scalar, tokens_text
from shardwright.orchestrator.report.page import charts, words
from shardwright.orchestrator.report.resolved import resolved_job
from shardwright.orchestrator.report.text import Facts, Report
from shardwright.orchestrator.report.tried import (
    auto_text,
    candidate,
    candidate_text,
    decided,
    is_chosen,
    tries_of,
)
from shardwright.orchestrator.report.verdict import published_text, verdicts
from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.terminal.age import AGAIN
from shardwright.orchestrator.terminal.strict_json import dumps

REPORT, PAGE = "report.json", "report.html"  # in the folder of a job
FUNCTIONS = 40  # with their kernels on a page
KERNELS = 12
COLLECTIVES = 200
MOMENTS = 40
MATTERS = 0.005  # of the step; functions below are without their kernels
_NEEDED = ("functions", "step_chart", "timelines")


def report_page(report: Report) -> str:
    """The page of a report. Raises UsageError for a report that lacks what a page shows."""
    missing = [key for key in _NEEDED if key not in report]
    if missing:
        raise UsageError(
            "SW_REPORT",
            f"a page requires the keys {', '.join(_NEEDED)} of a report, missing:"
            f" {', '.join(missing)}",
            hint="the report was written by an older release: run or plan the job again",
        )
    timing = report["timing"]
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            inference=_inference(report),
            breakdown=charts.bar(timing["breakdown_ps"], timing["step_time_ps"], words.ps_text),
            budget=charts.bar(
                report["memory"]["categories"],
                max(report["memory"]["limit_bytes"], report["memory"]["peak_bytes"]),
                text.size_text,
            ),
            memory=charts.memory(report["memory"]),
            pipeline=charts.pipeline(report),
            runs=charts.kinds_of_runs(report),
            timelines=[(one, charts.engines(one)) for one in report["timelines"]],
            losses=_losses(report),
            longest=_longest(report),
            goal=_goal(report),
            tried=tries_of(report),
            auto=_auto(report),
            moments=_highest(report["memory"]["timeline"]),
            stored=_stored(report["provenance"]),
            verdicts=verdicts(report),
            settings=_settings(report),
            imported=_imported(report),
        )
    )


def _settings(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """The job table by table, with what was chosen where it leaves a choice, and why; of inference
    without what is said of training alone."""
    chosen, hidden = report.get("resolved", {}), OF_TRAINING if "inference" in report else ()

    def shown(key: str, value: Any) -> str:
        why = f" ({chosen[key]['why']})" if key in chosen else ""
        return f"{words.plain(value)}{why}"

    tables = {
        table: [
            (key, shown(f"{table}.{key}", value))
            for key, value in keys.items()
            if f"{table}.{key}" not in hidden
        ]
        for table, keys in resolved_job(report).items()
        if isinstance(keys, Mapping)
    }
    return [(table, rows) for table, rows in tables.items() if rows]


def _auto(report: Report) -> Facts:
    section, limit = decided(report), report["memory"]["limit_bytes"]
    if section is None:
        return {}
    rows = [
        (candidate(row), candidate_text(row, limit), is_chosen(row, section))
        for row in section["tried"]
    ]
    return {"told": auto_text(section, limit), "rows": rows}


def _stored(provenance: Facts) -> list[tuple[str, str]]:
    """When a stored answer was stored, and what asks anew; nothing of one that was computed."""
    if not (stored_s := provenance.get("stored_s")):
        return []
    when = datetime.fromtimestamp(stored_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [("stored", when), ("ask anew", provenance.get("again", AGAIN))]


def _imported(report: Report) -> Facts:
    """What became of another project's file, in a sentence and as rows; nothing without one."""
    if "imported" not in report:
        return {}
    told = dict(sections.imported(report))["from"]
    return {"told": told, "rows": field_rows(report["imported"])}


def _goal(report: Report) -> Facts:
    """What a goal comes to, in sentences and as rows; nothing without one."""
    if "goal" not in report:
        return {}
    told, needs = goal.told(report)
    return {"told": told, "needs": needs, "rows": goal.goal_rows(report["goal"])}


def _inference(report: Report) -> Facts | None:
    """What a step of inference is called; None of training."""
    if (section := report.get("inference")) is None:
        return None
    return {"result": result_text(section), "tokens": tokens_text(section)}


def _losses(report: Report) -> tuple[str, str] | None:
    losses = report["numerics"]["losses"] if "numerics" in report else ()
    return charts.line(losses, scalar(report)) if sum(v is not None for v in losses) > 1 else None


def _longest(report: Report) -> list[Facts]:
    """Functions whose kernels are shown: the longest, and all that matter."""
    own = [row for row in report["functions"][:FUNCTIONS] if row["kernels"]]
    least = MATTERS * report["timing"]["step_time_ps"]
    return [row for n, row in enumerate(own) if not n or row["time_ps"] >= least]


def _highest(timeline: list[Facts]) -> list[Facts]:
    kept = sorted(timeline, key=lambda row: -row["live_bytes"])[:MOMENTS]
    return [row for row in timeline if row in kept]


def compare_page(found: Facts, tables: Sequence[Any]) -> str:
    """The page of a comparison, and its tables of text (`compare.py`)."""
    return _environment().get_template("compare.html").render(found=found, tables=tables)


def write_report(report: Report, folder: Path) -> None:
    """Write a report and its page into a folder. Raises UsageError (SW_OUTPUT)."""
    outputs.write(folder / REPORT, dumps(report, indent=1))
    outputs.write(folder / PAGE, report_page(report))


def _number(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_number, value))
    return str(value) if isinstance(value, str | bool) else f"{value:,.6g}"


@cache
def _environment() -> Environment:
    loader = PackageLoader(__package__)
    made = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "bytes": text.size_text,
        "seconds": text.seconds_text,
        "ps": words.ps_text,
        "count": text.count_text,
        "parameters": text.parameters_text,
        "counted": text.counted,
        "flops": words.flops_text,
        "dollars": words.dollars,
        "price_told": words.price_told,
        "plain": words.plain,
        "published": published_text,
        "number": _number,
    }
    made.globals |= {
        "percent": partial(text.share_text, digits=1),
        "rate": text.rate_text,
        "kind_of": charts.kind_of,
        "limits": {"functions": FUNCTIONS, "kernels": KERNELS, "collectives": COLLECTIVES},
        "css": Markup(loader.get_source(made, "report.css")[0]),  # our own file
    }
    return made
