"""What partitioning decided, as texts and remarks of steps (`compiler/steps.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from shardwright.compiler.ir.ops.host import DEVICE
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.program import StepPlan
from shardwright.compiler.steps import Remark
from shardwright.sharding.partition.partitioned import PartitionedGraph, SlotLike
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.strategies import OUTPUT, Recipe, ValueId, value_ids


class Asked(Protocol):
    """A graph with what a recipe asks for."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def specs(self) -> Mapping[ValueId, ShardingSpec]:
        """Where values have to live."""


def constraints(asked: Asked | None) -> Remark:
    """What a recipe asks for; what has no remark is the partitioner's choice."""
    pairs = value_ids(asked.graph) if asked else ()
    specs = asked.specs if asked else {}
    found = {v: f"constraint {specs[key]}" for key, v in pairs if key in specs}
    return lambda value: found.get(value, "")


def places(part: PartitionedGraph) -> Remark:
    """The axes that shard each dim of each value."""
    return lambda value: str(part.specs[value]) if value in part.specs else ""


def recipe_text(recipe: Recipe, inputs: Sequence[SlotLike], outputs: Sequence[SlotLike]) -> str:
    """Who decided what, and what is expected of the partitioner."""
    lines = [f"mesh: {recipe.mesh}", "", "who decided where a leaf lives:"]
    lines += [f"  {name}: {why}" for name, why in recipe.reasons.items()]
    lines += ["", "results of the step:"]
    for number, slot in enumerate(outputs):
        spec = recipe.specs.get((OUTPUT, number))
        lines.append(f"  {slot.name}: {spec or 'open: the partitioner places it'}")
    lines += [f"  {inputs[i].name}: placed as it came in" for i, _ in recipe.tied]
    lines += ["", "collectives that the recipe expects (code of a loop once):"]
    if recipe.predicted is None:
        lines.append("  nothing is predicted: the shardings are the user's")
    else:
        lines += [
            f"  {count} x {p.kind} over {'+'.join(p.axes)}: {p.type}"
            for p, count in recipe.predicted.items()
        ]
    return "\n".join(lines) + "\n"


def slots_text(
    graph: Graph, inputs: Sequence[SlotLike], outputs: Sequence[SlotLike], names: str = "%in"
) -> str:
    """The role of every input and result of a step."""
    return "".join(
        [
            *_slot_lines("inputs", names, graph.inputs, inputs),
            "\n",
            *_slot_lines("results", "result ", graph.outputs, outputs),
        ]
    )


def _slot_lines(
    title: str, prefix: str, values: Sequence[Value], slots: Sequence[SlotLike]
) -> list[str]:
    rows = [(f"{prefix}{i}", s, v.type) for i, (s, v) in enumerate(zip(slots, values, strict=True))]
    width = max((len(s.name) for _, s, _ in rows), default=0)
    lines = [f"{title}: place, role, name, type\n"]
    for place, slot, kind in rows:
        samples = "" if slot.batch_dim is None else f", samples along dim {slot.batch_dim}"
        lines.append(f"  {place:<10} {slot.role:<10} {slot.name:<{width}}  {kind}{samples}\n")
    return lines


def plan_text(plan: StepPlan) -> str:
    """What joins the programs of a step: mesh, schedule, buffers, streams, messages of stages."""
    mesh = ", ".join(f"{axis} = {size}" for axis, size in plan.mesh.items())
    lines = [f"mesh: {mesh}", f"micro-batches: {plan.num_microbatches}", "", "schedule:"]
    for stage, schedule in enumerate(plan.schedules):
        runs = ", then ".join(f"{' '.join(names)} x {count}" for names, count in schedule)
        lines.append(f"  cores of stage {stage} run {runs}")
    lines += ["", "programs:"]
    for program in plan.programs:
        lines.append(f"  {program.name} (stage {program.stage})")
        lines.append(f"    reads  {' '.join(program.inputs)}")
        lines.append(f"    writes {' '.join(program.outputs)}")
    lines += ["", "streams of collectives (those not listed are on stream 0):"]
    for (kind, axes), stream in sorted(plan.streams.items()):
        lines.append(f"  {kind} over {'+'.join(axes)}: stream {stream}")
    lines += ["", "named buffers of every core: role, local type, layout, name"]
    for info in plan.buffers.values():
        spec = ", ".join("+".join(axes) or "-" for axes in info.axes)
        where = "" if info.memory == DEVICE else f" in {info.memory} memory"
        lines.append(f"  {info.role:<10} {info.local_type!s:<28} [{spec}] {info.name}{where}")
    if plan.transfers:
        lines += ["", "messages between stages:", *(f"  {t}" for t in plan.transfers)]
    return "\n".join(lines) + "\n"
