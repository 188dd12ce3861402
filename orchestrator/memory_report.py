"""The memory of a step for people: the report's section, `--explain memory`, and what would help.

Sizes come from the compiled programs, the estimate made before compiling stands beside them. A
change is not guessed: the job is planned again with it, and what it saves is the difference of the
two estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from compiler.diagnostics import DiagnosticError
from orchestrator.build import Built, Layout, Stages, planned
from orchestrator.bundling import compiled_footprints
from orchestrator.config import JobConfig, MeshConfig
from orchestrator.screen import size_text
from orchestrator.service import UnitService
from sharding.footprint import worst_stage
from sharding.mesh import Mesh
from sharding.settings import AUTO, DISTRIBUTED_OPTIMIZER
from sharding.strategies.decisions import WEIGHTS

LISTED = 20  # tensors at the peak that a report holds
_BAR = 16
_NUMBERS = ("position", "times", "in use")
_PER_PROGRAM = 5  # positions of a program on the screen


def memory_section(built: Built) -> dict[str, Any]:
    """Memory per core after compilation: exact named buffers and arenas, and the timeline."""
    target, before = built.layout.target, built.plan.footprint
    stages = compiled_footprints(built)
    found = worst_stage(stages)
    return {
        "limit_bytes": target.limit_bytes,
        "reserve_bytes": target.reserve_bytes_per_core,
        "peak_bytes": found.peak_bytes,
        "peak_program": found.peak_program,
        "fits": found.peak_bytes <= target.limit_bytes,
        "categories": dict(found.categories),
        "argument_bytes": dict(found.argument_bytes),
        "arena_bytes": dict(found.arena_bytes),
        "estimate": {
            "peak_bytes": before.peak_bytes,
            "arena_bytes": dict(before.arena_bytes),
        },
        "per_stage": [
            {"stage": n, "peak_bytes": s.peak_bytes, "categories": dict(s.categories)}
            for n, s in enumerate(stages)
        ],
        "timeline": [dataclasses.asdict(moment) for moment in found.timeline],
        "largest": [
            {"name": h.name, "category": h.category, "bytes": h.num_bytes, "loc": str(h.loc)}
            for h in found.held[:LISTED]
        ],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A job with one decision changed, in the words of the command line."""

    text: str
    job: JobConfig


def changes(job: JobConfig, layout: Layout) -> Iterator[Change]:
    """What may be tried when a job does not fit, each one flag or `--set` away.

    Changes that move samples between micro-batches keep the global batch.
    """
    kept = dataclasses.replace(job.strategy, global_batch=layout.global_batch)
    same_batch = dataclasses.replace(job, strategy=kept)
    sizes = _given_sizes(layout.mesh)
    if job.strategy.micro_batch > 1:
        yield _strategy(same_batch, micro_batch=job.strategy.micro_batch // 2)
    if job.strategy.remat != "full" and not job.model.entry:
        yield _strategy(job, remat="full")
    if not job.strategy.reshard_after_forward:
        yield _strategy(job, reshard_after_forward=True)
    yield from (_strategy(job, zero=stage) for stage in _finer_stages(job, sizes))
    yield from _other_meshes(job, same_batch, sizes)


def _given_sizes(mesh: Mesh) -> dict[str, int]:
    """The axes as a job names them: `ep` is a part of `dp_shard`."""
    sizes = dict(mesh.sizes)
    sizes["dp_shard"] = sizes.get("dp_shard", 1) * sizes.get("ep", 1)
    return sizes


def _finer_stages(job: JobConfig, sizes: dict[str, int]) -> list[int]:
    """ZeRO stages that spread more than the job's."""
    defaults = {"fsdp": WEIGHTS, "llm-training": DISTRIBUTED_OPTIMIZER}
    zero = job.strategy.zero
    now = defaults.get(job.strategy.name, 0) if zero == AUTO else zero
    stages = (DISTRIBUTED_OPTIMIZER, WEIGHTS) if sizes["dp_shard"] > 1 else ()
    return [stage for stage in stages if stage > now]


def _other_meshes(job: JobConfig, same_batch: JobConfig, sizes: dict[str, int]) -> Iterator[Change]:
    """Copies turned into shards, shards into tensor-parallel ranks, and twice the instances."""
    shard, copies = sizes["dp_shard"], sizes.get("dp_replicate", 1)
    if copies > 1:
        yield _mesh(job, {**sizes, "dp_replicate": 1, "dp_shard": shard * copies})
    if shard % 2 == 0:
        yield _mesh(same_batch, {**sizes, "dp_shard": shard // 2, "tp": 2 * sizes.get("tp", 1)})
    wide = _mesh(job, {**sizes, "dp_shard": 2 * shard})
    more = 2 * job.cluster.instances
    cluster = dataclasses.replace(job.cluster, instances=more)
    text = f"{wide.text} cluster.instances={more}"
    yield Change(text, dataclasses.replace(wide.job, cluster=cluster))


def _strategy(job: JobConfig, **keys: Any) -> Change:
    text = " ".join(f"strategy.{key}={str(value).lower()}" for key, value in keys.items())
    return Change(
        text, dataclasses.replace(job, strategy=dataclasses.replace(job.strategy, **keys))
    )


def _mesh(job: JobConfig, sizes: dict[str, int]) -> Change:
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp_shard"}
    text = " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    return Change(text, dataclasses.replace(job, mesh=MeshConfig(**sizes)))


def suggestions(job: JobConfig, service: UnitService, limit_bytes: int) -> list[dict[str, Any]]:
    """Every change that saves memory, planned: `{change, saves_bytes, peak_bytes, fits}`, what
    saves most first.

    Sizes are estimates from before compiling. A change that cannot be planned is left out.
    """
    base = planned(job, service, Stages())
    before = base.plan.footprint.peak_bytes
    rows = []
    for change in changes(job, base.layout):
        try:
            peak = planned(change.job, service, Stages()).plan.footprint.peak_bytes
        except DiagnosticError:
            continue  # this model, mesh or batch does not allow it
        if peak < before:
            row = {"change": change.text, "saves_bytes": before - peak, "peak_bytes": peak}
            rows.append(row | {"fits": peak <= limit_bytes})
    return sorted(rows, key=lambda row: -row["saves_bytes"])


def explain(job: JobConfig, memory: dict[str, Any]) -> list[dict[str, Any]]:
    """`suggestions` of a job whose memory section is known."""
    from orchestrator.job import unit_service

    with unit_service(job, None) as service:
        return suggestions(job, service, memory["limit_bytes"])


def print_memory(memory: dict[str, Any]) -> None:
    """The timeline, the tensors at the peak and what would help, on the terminal."""
    console = Console(highlight=False)
    console.print(_timeline(memory))
    console.print(_tensors(memory))
    if memory["suggestions"]:
        console.print(_changes(memory["suggestions"]))


def _timeline(memory: dict[str, Any]) -> Table:
    """The highest positions of every program, in order; bars show what named buffers leave."""
    named = sum(memory["argument_bytes"].values())
    title = f"bytes in use over the step, named buffers {size_text(named)}"
    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in ("program", "position", "what", "times", "in use", "above named buffers"):
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    top = max(max(m["live_bytes"] for m in memory["timeline"]) - named, 1)
    for program in memory["arena_bytes"]:
        rows = [m for m in memory["timeline"] if m["program"] == program]
        highest = sorted(rows, key=lambda m: -m["live_bytes"])[:_PER_PROGRAM]
        for row in sorted(highest, key=lambda m: m["position"]):
            size = row["live_bytes"]
            bar = "#" * round((size - named) / top * _BAR)
            cells = (row["position"], row["what"], row["repeats"], size_text(size), bar)
            table.add_row(program, *map(str, cells))
    return table


def _tensors(memory: dict[str, Any]) -> Table:
    title = f"largest tensors at the peak, in {memory['peak_program']}"
    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in ("tensor", "category", "bytes", "where"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for row in memory["largest"]:
        where = row["loc"].rpartition("/")[2]
        table.add_row(row["name"], row["category"], size_text(row["bytes"]), where)
    return table


def _changes(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="what would save memory (estimated)", title_justify="left", pad_edge=False)
    for name in ("change", "saves", "peak then", "fits"):
        table.add_column(name, justify="left" if name == "change" else "right")
    for row in rows:
        saved, peak = size_text(row["saves_bytes"]), size_text(row["peak_bytes"])
        table.add_row(row["change"], saved, peak, "yes" if row["fits"] else "no")
    return table
