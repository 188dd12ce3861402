"""`--explain fusion`: the kernels of every compiled function, what they keep on chip, and why they
are not larger.

The functions are lowered again here, with the user's locations; compile units themselves carry
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from shardwright.compiler.fusion.logical_core import LogicalCore
from shardwright.compiler.isa.kernel import KernelProgram, Tensor
from shardwright.compiler.lower.explain import Describe, explain_fusion
from shardwright.compiler.outline import outline
from shardwright.compiler.passes.pipeline import unit_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import Facts, Report
from shardwright.orchestrator.road.build import built_again
from shardwright.orchestrator.terminal import terminal

_SHOWN = 0.01  # of a function's bytes; smaller kernels are only counted
_MIB = 2**20
_FIRST_REGISTER = 1 << 20  # above every register of a function
_NUMBERS = ("ops", "MiB moved", "avoided")


def explain(job: JobConfig, _report: Report) -> Sequence[Facts]:
    """One entry per distinct function of the job: name and kernels, largest traffic first.

    Raises the DiagnosticError of the stage that refuses.
    """
    built = built_again(job)
    target = built.layout.target
    options = replace(job.compiler, lnc=target.lnc)
    passes, oracle = unit_passes(options, target.core.generation), LogicalCore(target, options)
    found = []
    for unit in outline(built.plan.step).functions:
        graph = run(unit.graph, passes)
        stories = explain_fusion(graph, unit.signature, options, oracle, notes_of(oracle))
        rows = [_entry(story) for story in sorted(stories, key=lambda s: -s.moved_bytes)]
        found.append({"function": unit.name, "kernels": rows})
    return found


def notes_of(core: LogicalCore) -> Describe:
    """Notes on the code that `core` has for a kernel."""

    def describe(program: KernelProgram, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        return core.generate(program, tensors, _FIRST_REGISTER).notes

    return describe


def _entry(story: Any) -> Facts:
    return {
        "kernel": story.name,
        "location": f"{story.loc.file}:{story.loc.line}",
        "operators": story.operators,
        "moved_bytes": story.moved_bytes,
        "avoided_bytes": story.avoided_bytes,
        "notes": list(story.notes),
        "refused": [
            {"reader": merge.reader, "num_bytes": merge.num_bytes, **asdict(merge.refusal)}
            for merge in sorted(story.refused, key=lambda m: -m.num_bytes)
        ],
    }


def show(functions: list[Facts]) -> None:
    """The explanation as one table per function that moves at least 1 % of all bytes."""
    console = terminal.console()
    total = sum(_moved(f) for f in functions)
    for one in functions:
        if _moved(one) >= _SHOWN * total:
            console.print(_table(one))


def _moved(function: Facts) -> int:
    return sum(k["moved_bytes"] for k in function["kernels"])


def _table(function: Facts) -> Table:
    moved, rows = _moved(function), function["kernels"]
    shown = [r for r in rows if r["moved_bytes"] >= _SHOWN * moved]
    title = f"{function['function']}: {len(rows)} kernels move {moved / _MIB:,.1f} MiB per call"
    if len(shown) < len(rows):
        title += f" ({len(rows) - len(shown)} below 1 % not shown)"
    columns = ("kernel", "where", *_NUMBERS, "not merged with")
    table = terminal.table(*columns, title=title, right=_NUMBERS)
    for row in shown:
        table.add_row(
            "\n".join([row["kernel"], *row["notes"]]),
            row["location"].rpartition("/")[2],
            str(row["operators"]),
            f"{row['moved_bytes'] / _MIB:,.1f}",
            f"{row['avoided_bytes'] / _MIB:,.1f}",
            "\n".join(f"{m['reader']}: {m['rule']}: {m['detail']}" for m in row["refused"][:2]),
        )
    return table
