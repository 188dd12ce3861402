"""Sections of a report about the parts of a step: its functions with their kernels and source
lines, the runs of programs on every stage, and one call of the longest functions.

Times come from the `time` unit, operations and places from the linked programs. Lists are bounded;
what is left out is one row that says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.program import Function, Program
from shardwright.orchestrator.report.text import Facts
from shardwright.sim_cluster.timing.step_parts import FunctionTime, StepParts

FUNCTIONS = 100
KERNELS = 40
_CODE = ("compute", "memory")
_EVENTS = ("collective_start", "collective_wait")


def function_rows(parts: StepParts, programs: Mapping[str, Program]) -> list[Facts]:
    """What every function of the last-finishing core takes, the longest first."""
    rows = [_function(time, programs) for time in parts.functions]
    return _bounded(rows, FUNCTIONS, "functions")


def _function(time: FunctionTime, programs: Mapping[str, Program]) -> Facts:
    if time.number < 0:
        name = "launch" if time.program else "wait for other stages"
        return _row(time, name, [])
    program = programs[time.program]
    function = program.functions[time.number]
    code = sum(time.charged_ps.get(category, 0) for category in _CODE)
    kernels = sorted(_kernels(time, function, program, code), key=lambda k: -k["time_ps"])
    return _row(time, function.name, kernels)


def _row(time: FunctionTime, name: str, kernels: list[Facts]) -> Facts:
    return {
        "program": time.program,
        "function": name,
        "calls": time.calls,
        "time_ps": sum(time.charged_ps.values()),
        "breakdown_ps": dict(time.charged_ps),
        "flops": sum(k["flops"] for k in kernels),
        "hbm_bytes": sum(k["hbm_bytes"] for k in kernels),
        "loc": kernels[0]["loc"] if kernels else "",
        "kernels": _bounded(kernels, KERNELS, "kernels"),
    }


def _kernels(
    time: FunctionTime, function: Function, program: Program, code_ps: int
) -> Iterator[Facts]:
    """The kernels of all calls. What the calls took is shared out by what a call takes alone."""
    whole = sum(k.duration_ps for k in time.kernels) or 1
    passed = 0
    code = zip(*function.subgraphs, strict=True)
    own = (same for same in code if same[0].program.kind not in _EVENTS)
    for same, alone in zip(own, time.kernels, strict=True):
        before, passed, loc = passed, passed + alone.duration_ps, same[0].program.loc
        yield {
            "name": alone.name,
            # Empty for what no line of the user's made.
            "loc": str(Loc(*program.locations[loc])) if 0 <= loc < len(program.locations) else "",
            "time_ps": code_ps * passed // whole - code_ps * before // whole,
            "busy_ps": {engine: time.calls * ps for engine, ps in alone.busy_ps.items()},
            "flops": time.calls * sum(flops(kernel.program) for kernel in same),
            "hbm_bytes": time.calls * alone.hbm_bytes,
        }


def flops(kernel: KernelProgram) -> int:
    """Two per multiplication of the contractions of a kernel, as its code runs them."""
    total = 0
    for node in kernel.nodes:
        if node.op == "contract":
            spanned = {a for source in node.inputs for a in kernel.nodes[source].iter_dims}
            total += 2 * math.prod(kernel.iter_dims[a] for a in spanned)
    return total


def _bounded(rows: list[Facts], most: int, what: str) -> list[Facts]:
    """The first rows, and the sum of the others as one."""
    if len(rows) <= most:
        return rows
    kept, rest = rows[: most - 1], rows[most - 1 :]
    text = f"{len(rest)} more {what}"
    total = {key: _sum([row[key] for row in rest], text) for key in rest[0]}
    blank = {"loc": "", "program": "", "kernels": []}
    return [*kept, total | {key: value for key, value in blank.items() if key in total}]


def _sum(values: Sequence[Any], text: str) -> Any:
    """Numbers, and tables of numbers, added up; `text` for anything else."""
    match values:
        case [int(), *_]:
            return sum(values)
        case [dict(), *_]:
            keys = dict.fromkeys(key for value in values for key in value)
            return {key: sum(value.get(key, 0) for value in values) for key in keys}
    return text


def step_chart(parts: StepParts) -> list[Facts]:
    """Runs of programs, stage by stage: `[program, first run, number of runs, start, end]`."""
    rows: dict[int, list[list[Any]]] = {}
    for run in parts.runs:
        row = [run.program, run.number, run.runs, run.start_ps, run.end_ps]
        rows.setdefault(run.stage, []).append(row)
    return [{"stage": stage, "runs": runs} for stage, runs in rows.items()]


def timelines(parts: StepParts, programs: Mapping[str, Program]) -> list[Facts]:
    """One call of the longest functions: slices `[name, start, end]` per track."""
    return [
        {
            "program": one.program,
            "function": programs[one.program].functions[one.number].name,
            "duration_ps": one.duration_ps,
            "left_out": one.left_out,
            "tracks": [
                {"name": track.name, "slices": [list(s) for s in track.slices]}
                for track in one.tracks
            ],
        }
        for one in parts.timelines
    ]
