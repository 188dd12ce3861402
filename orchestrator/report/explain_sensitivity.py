"""`--explain sensitivity`: how far the step moves when a figure it rests on is another.

The job's programs are timed again with every figure lower and higher; nothing is compiled anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import Facts, Report, change_text, share_text
from shardwright.orchestrator.road.build import built_again
from shardwright.orchestrator.road.timing import step_of
from shardwright.orchestrator.terminal import terminal
from shardwright.sim_cluster.timing.sensitivity import SHARE, Moved, sensitivity

LEAST = 1e-3  # of the step; figures that move it less are only counted


def explain(job: JobConfig, _report: Report) -> list[Facts]:
    """One entry per figure, the one that moves the step most first.

    Raises the DiagnosticError of the stage that refuses.
    """
    return [
        {
            "name": moved.name,
            "value": moved.fact.value,
            "status": moved.fact.status,
            "source": moved.fact.source,
            "step_change_lower": moved.lower,
            "step_change_higher": moved.higher,
        }
        for moved in moved_by(job)
    ]


def moved_by(job: JobConfig) -> list[Moved]:
    """How far every figure moves the step of a job."""
    built = built_again(job)
    return sensitivity(step_of(built, built.programs), job.cluster.profile)


def show(rows: Sequence[Facts]) -> None:
    """The explanation as a table; figures that hardly matter are counted below it."""
    console = terminal.console()
    ends = (f"{-100 * SHARE:+.0f} %", f"{100 * SHARE:+.0f} %")
    columns, title = ("figure", "value", "status", *ends), "what the step rests on"
    table = terminal.table(*columns, title=title, right=("value", *ends))
    left = 0
    for row in rows:
        changes = row["step_change_lower"], row["step_change_higher"]
        if max(map(abs, changes)) < LEAST:
            left += 1
            continue
        table.add_row(row["name"], f"{row['value']}", row["status"], *map(change_text, changes))
    console.print(table)
    console.print(f"{left} more figures move it by less than {share_text(LEAST)} each")
