"""`--explain collective`: every collective of a step with its algorithm and why, what of it is
exposed, and how long each other algorithm would take.

The step is built once more for its calls; units and times come from the cache.
"""

from __future__ import annotations

from typing import Any

from shardwright.compiler.machine.target import PS_PER_S
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.report import collective_rows
from shardwright.orchestrator.report.sections import titled
from shardwright.orchestrator.report.text import Facts, Report, seconds_text, share_text, size_text
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import step_of, time_programs
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.terminal import terminal
from shardwright.sim_cluster.network.network import Network

_SHOWN = 30  # rows on the terminal; `--json` has all


def explain(job: JobConfig, _report: Report) -> list[Facts]:
    """The rows of `collectives`, the most exposed first, with `algorithm_in_full` and
    `alternatives` `[{algorithm, time_ps}]`: one call under the others, the fastest first.

    Raises the DiagnosticError of the stage that refuses.
    """
    with unit_service(job, None) as service:
        built = build(job, service, Stages())
        timing = time_programs(built, built.programs, service).chosen
    step = step_of(built, built.programs)
    network = Network(
        step.target, step.instances, step.mesh, timing.profile, step.placement, step.collectives
    )
    rows = collective_rows(timing, built.plan.mesh)
    for row, use in zip(rows, timing.collectives, strict=True):
        chosen, *others = network.alternatives(use.call).items()
        row["algorithm_in_full"] = chosen[0]
        ranked = sorted(others, key=lambda item: item[1])
        row["alternatives"] = [{"algorithm": name, "time_ps": ps} for name, ps in ranked]
    return sorted(rows, key=lambda row: (-row["exposed_ps"], -row["time_ps"]))


def show(rows: list[Facts]) -> None:
    """A table; below it, by number, the reasons and the other algorithms."""
    console = terminal.console()
    right = ("bytes", "times", "one takes", "exposed")
    title = "collectives, the most exposed first"
    table = terminal.table(
        "#", "collective", "over", *right, title=title, right=("#", *right), overflow="fold"
    )
    merged = _merged(rows)
    for n, row in enumerate(merged[:_SHOWN]):
        table.add_row(
            str(n + 1),
            row["kind"],
            f"{row['axis']} ({row['group_size']})",
            size_text(row["bytes"]),
            f"{row['count']:,}",
            seconds_text(row["time_ps"] / max(row["count"], 1) / PS_PER_S),
            share_text(row["exposed_ps"], row["time_ps"]),
        )
    console.print(table)
    for n, row in enumerate(merged[:_SHOWN]):
        for line in titled(f"{n + 1:2d}", _reason(row), console.width):
            console.print(line, soft_wrap=True)
    if len(merged) > _SHOWN:
        console.print(f"and {len(merged) - _SHOWN} more rows: use --json")


def _reason(row: Facts) -> str:
    others = ", ".join(
        f"{one['algorithm']} {seconds_text(one['time_ps'] / PS_PER_S)}"
        for one in row["alternatives"]
    )
    text = f"{row['algorithm_in_full']}, because {row['why'].partition('; ')[0]}"
    return f"{text}. Others: {others}" if others else text


def _merged(rows: list[Facts]) -> list[Facts]:
    """Rows that say the same once, with their counts and times added up."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[k] for k in ("kind", "axis", "group_size", "bytes", "algorithm", "why"))
        if key in found:
            for name in ("count", "time_ps", "exposed_ps"):
                found[key][name] += row[name]
        else:
            found[key] = dict(row)
    return sorted(found.values(), key=lambda row: (-row["exposed_ps"], -row["time_ps"]))
