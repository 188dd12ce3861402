"""What a golden cell keeps of a job: digests of its code, times, memory and figures, stage by
stage.

Nothing here depends on where the checkout lies, on the compiler's release or sources, on
zstandard, or on lines of source files: a digest changes when a graph or code does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from shardwright.compiler.ir.analysis import count_ops
from shardwright.compiler.ir.serialize import dump
from shardwright.compiler.isa.encode import Sections, encode_function, pack_attrs
from shardwright.compiler.isa.program import Function, Kernel, Program
from shardwright.compiler.neff.bundle import program_bytes
from shardwright.compiler.neff.manifest import Manifest
from shardwright.compiler.neff.writer import pack
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.report import base_report
from shardwright.orchestrator.road.build import Built, build
from shardwright.orchestrator.road.bundling import manifest_of
from shardwright.orchestrator.road.stages import Stages, Traces
from shardwright.orchestrator.road.timing import Timings, time_programs
from shardwright.orchestrator.service.service import UnitService

Rows = dict[str, Any]
Record = dict[str, Rows]
"""Stage of the road -> row -> what is kept of it; every row is one line of a golden file."""

SHORT = 16
"""Hexadecimal digits of the digests of parts, which only say which part a difference is in."""
_DIGITS = 12
"""Of a figure that is no integer: what libraries of mathematics agree on."""
_META = {"graph": "golden"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A job that was built and timed."""

    built: Built
    timings: Timings
    report: Mapping[str, Any]


def run_cell(job: JobConfig, service: UnitService, traces: Traces) -> Cell:
    """The road of `plan`, without its cache of answers. Raises what refuses the job."""
    stages = Stages(traces=traces)
    built = build(job, service, stages)
    timings = time_programs(built, built.programs, service)
    return Cell(built, timings, base_report(built, timings, service, stages, {}))


def record(cell: Cell) -> Record:
    """All stages of a cell, in the order of the road."""
    return {
        "capture": _captured(cell),
        "plan": _planned(cell.built),
        "code": _code(cell),
        "bundle": _bundle(cell.built),
        "memory": _memory(cell.report["memory"]),
        "time": _times(cell.timings),
        "functions": _functions(cell.report["functions"]),
        "collectives": _collectives(cell.report["collectives"]),
        "report": _figures(cell.report),
        "findings": _findings(cell),
    }


def sha(data: bytes, digits: int = 64) -> str:
    """Hexadecimal digits of a digest."""
    return hashlib.sha256(data).hexdigest()[:digits]


def program_sha(program: Program) -> str:
    """Digest of the NEFF of a program: with container and table of contents, uncompressed, without
    places of the user's source."""
    functions = [_without_places(function) for function in program.functions]
    bare = replace(program, locations=(), functions=functions)
    return sha(program_bytes(bare, _META, compress=False))


def _without_places(function: Function) -> Function:
    """The code alone: jax gives operators of a helper that was traced before the place of its first
    caller in the process, so places depend on what else was captured."""

    def bare(kernels: Iterable[Kernel]) -> list[Kernel]:
        return [replace(k, program=replace(k.program, loc=-1)) for k in kernels]

    partner = None if function.partner is None else bare(function.partner)
    return replace(function, kernels=bare(function.kernels), partner=partner)


def _captured(cell: Cell) -> Rows:
    graph = cell.report["graph"]
    sizes = {"ops": sum(graph["ops"].values()), "params": graph["params"]}
    sizes["flops_per_step"] = graph["flops_per_step"]
    rows: Rows = {"graph": {"sha": _graph_sha(cell.built.graph), **sizes}}
    return rows | {"batch": cell.report["batch"]}


def _graph_sha(graph: Any) -> str:
    return sha(dump(graph, with_locs=False), SHORT)


def _planned(built: Built) -> Rows:
    """The local graph of every program, and what joins them."""
    step = built.plan.step
    rows: Rows = {
        program.name: {
            "graph": _graph_sha(program.graph),
            "ops": sum(count_ops(program.graph).values()),
            "stage": program.stage,
            "buffers": sha(pack_attrs([program.inputs, program.outputs]), SHORT),
        }
        for program in step.programs
    }
    joined = {
        "schedule": [[list(names), count] for stage in step.schedules for names, count in stage],
        "transfers": [list(astuple(t)) for t in step.transfers],
        "streams": sorted([kind, list(axes), n] for (kind, axes), n in step.streams.items()),
    }
    rows["joined"] = {name: sha(pack_attrs(value), SHORT) for name, value in joined.items()}
    estimate = built.plan.footprint
    rows["estimate"] = {"peak_bytes": estimate.peak_bytes, **estimate.arena_bytes}
    return rows


def _code(cell: Cell) -> Rows:
    """Every program, and its functions behind it."""
    rows: Rows = {}
    for found in cell.report["programs"]:
        program = cell.built.programs[found["name"]]
        rows[program.name] = {
            "sha256": program_sha(program),
            "static": found["instructions_static"],
            "dynamic": found["instructions_dynamic"],
            "arena_bytes": program.arena_bytes,
        }
        for function in program.functions:
            rows[f"{program.name}/{function.name}"] = {
                "sha": _sections_sha(encode_function(_without_places(function))),
                "kernels": len(function.kernels),
            }
    return rows


def _sections_sha(sections: Sections) -> str:
    parts = (name.encode() + bytes(content) for name, content in sorted(sections.items()))
    return sha(b"".join(parts), SHORT)


def _bundle(built: Built) -> Rows:
    """The manifest with the digests of all programs, which is the bundle."""
    digests = {name: program_sha(program) for name, program in built.programs.items()}
    manifest: Manifest = replace(manifest_of(built), programs=digests, compiler_version="")
    meta = manifest.to_meta()
    buffers = {"count": len(manifest.buffers), "sha": sha(pack_attrs(meta["buffers"]), SHORT)}
    return {
        "manifest": {"sha256": sha(pack("manifest", meta, {}))},
        "buffers": buffers | {"named_bytes": manifest.named_bytes},
        "arena": {"bytes": manifest.arena_bytes},
    }


def _memory(memory: Mapping[str, Any]) -> Rows:
    peak = {key: memory[key] for key in ("peak_bytes", "limit_bytes", "reserve_bytes")}
    live = [moment["live_bytes"] for moment in memory["timeline"]]
    return {
        "peak": peak | {"program": memory["peak_program"]},
        "arguments": memory["argument_bytes"],
        "timeline": {"moments": len(live), "bytes": sum(live)},
        **{
            f"stage {row['stage']}": {"peak_bytes": row["peak_bytes"], **_filled(row["categories"])}
            for row in memory["per_stage"]
        },
    }


def _times(timings: Timings) -> Rows:
    """The step under every profile, and where the time of every pipeline stage goes."""
    runs = dict(timings.band)
    if timings.healthy is not None:
        runs["healthy"] = timings.healthy
    rows: Rows = {}
    for name, timing in runs.items():
        rows[name] = {"step_ps": timing.step_time_ps, "lone_ps": timing.lone_ps}
        for stage, parts in enumerate(timing.stages_ps):
            rows[f"{name} stage {stage}"] = _filled(parts)
    rows["hidden"] = _filled(timings.chosen.hidden_ps)
    rows["engines"] = _filled(timings.chosen.engines_ps)
    return rows


def _filled(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: value for name, value in parts.items() if value}


def _functions(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """What functions take of the step of the job's own profile."""
    kept = ("calls", "time_ps", "flops", "hbm_bytes")
    return _named((f"{r['program']}/{r['function']}", {key: r[key] for key in kept}) for r in rows)


def _collectives(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """What collectives take of it."""
    kept = ("count", "parts", "stream", "algorithm", "time_ps", "exposed_ps")

    def name(row: Mapping[str, Any]) -> str:
        return f"{row['kind']} {row['axis']} {row['group_size']} x {row['bytes']} B"

    return _named((name(row), {key: row[key] for key in kept}) for row in rows)


def _named(rows: Iterable[tuple[str, Any]]) -> Rows:
    """Rows by name; those that share one are numbered."""
    found: Rows = {}
    for name, row in rows:
        number = sum(other.partition(" #")[0] == name for other in found)
        found[f"{name} #{number + 1}" if number else name] = row
    return found


def _figures(report: Mapping[str, Any]) -> Rows:
    """What the report works out from the rest."""
    timing = report["timing"]
    rates = ("peak_flops_per_s", "mfu", "hfu", "tokens_per_s", "band_s", "confidence")
    rows: Rows = {
        "timing": {key: timing[key] for key in rates},
        "cost": report["cost"],
        "goodput": report["goodput"],
        "cores": report["logical_cores"],
        "bottleneck": {key: report["bottleneck"][key] for key in ("category", "share")},
        "streams": {str(row["stream"]): row["time_ps"] for row in report["streams"]["streams"]},
        "placement": {"order": report["placement"]["order"]},
    }
    if report["pipeline"]:
        rows["bubble"] = {"of_equal_stages": report["pipeline"]["bubble_of_equal_stages"]}
    if "faults" in report:
        rows["faults"] = {key: report["faults"][key] for key in ("slowdown", "rank_classes")}
    return {name: _shortened(row) for name, row in rows.items()}


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _findings(cell: Cell) -> Rows:
    """What the user is told; not where in the source."""
    rows = cell.report["findings"]
    return _named((f["code"], {"severity": f["severity"], "message": f["message"]}) for f in rows)
