"""`--explain sharding [TENSOR]`: who decided where tensors lie, and why each collective is there.

The plan itself keeps only what running it needs; the step is planned and partitioned once more
here, op by op.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import Facts, Report, share_text
from shardwright.orchestrator.road.build import partition_unit, planned
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.terminal import terminal
from shardwright.sharding.cut.pipeline.balance import by_stage
from shardwright.sharding.explain import explain_sharding

_NUMBERS = ("KiB", "times")
_SHOWN = 60  # rows of a table on the terminal; `--json` has all


def explain(job: JobConfig, _report: Report, tensor: str = "") -> Facts:
    """Tensors and collectives of a job; those that `tensor` names, or all leaves and collectives.

    Raises UsageError when nothing has that name, and the DiagnosticError of the stage that refuses.
    """
    with unit_service(job, None) as service:
        ready = planned(job, service, Stages())
        unit = partition_unit(job, ready.layout, service)
        told = explain_sharding(ready.prepared, unit)
    found = told.about(tensor) if tensor else told.leaves()
    if not found.tensors and not found.collectives:
        raise UsageError(
            "SW_EXPLAIN",
            f"--explain sharding requires a leaf, an op or a place of the step, got {tensor}",
            hint="for example params/lm_head, dot_general or model.py:12",
        )
    return {
        "tensors": list(map(_plain, found.tensors)),
        "collectives": list(map(_plain, found.collectives)),
        "stages": by_stage(ready.plan.parts, ready.prepared.num_stages),
    }


def _plain(row: Any) -> Facts:
    return asdict(row) | {"loc": f"{row.loc.file}:{row.loc.line}" if row.loc.file else ""}


def show(found: Facts) -> None:
    """Both tables on the terminal."""
    console = terminal.console()
    columns = ("tensor", "where", "type", "layout", "decided by")
    tensors = terminal.table(*columns, title="tensors", overflow="fold")
    for row in found["tensors"][:_SHOWN]:
        where = row["loc"].rpartition("/")[2]
        tensors.add_row(row["name"], where, row["type"], row["layout"], row["decided"])
    console.print(tensors)
    names = ("collective", "over", *_NUMBERS, "where", "why")
    moved = terminal.table(*names, title="collectives", right=_NUMBERS, overflow="fold")
    for row in found["collectives"][:_SHOWN]:
        moved.add_row(
            row["kind"] if row["predicted"] else f"{row['kind']} (not predicted)",
            f"{row['axes']} ({row['group_size']})",
            f"{row['num_bytes'] / 1024:,.1f}",
            str(row["times"]),
            row["loc"].rpartition("/")[2],
            row["cause"],
        )
    console.print(moved)
    if found["stages"]:
        parts = ("stage", "layers", "share of the cost")
        stages = terminal.table(*parts, title="pipeline stages", overflow="fold")
        for row in found["stages"]:
            layers = " + ".join(map(str, row["layers"]))
            stages.add_row(str(row["stage"]), layers, share_text(row["cost_share"], digits=1))
        console.print(stages)
    left = max(len(found[key]) - _SHOWN for key in ("tensors", "collectives"))
    if left > 0:
        console.print(f"and {left} more rows: name a tensor, or use --json")
