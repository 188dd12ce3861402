"""The strategies by name: one row per file, and the one road through all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.diagnostics import Diagnostic, ShardingError, did_you_mean
from shardwright.compiler.frontend.roles import WEIGHT_ROLES
from shardwright.compiler.frontend.shardings import ModuleShardings
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.sharding import shown
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.prepare.rewrites import (
    IOTA_DE_CSE,
    PADDED,
    SORTED_ROWS,
    WITHOUT_CONSTRAINTS,
)
from shardwright.sharding.settings import MANUAL, STRATEGIES, StrategySettings
from shardwright.sharding.strategies import Recipe
from shardwright.sharding.strategies.activations import constrain_activations, gather_operands
from shardwright.sharding.strategies.decisions import Decisions
from shardwright.sharding.strategies.fsdp import fsdp
from shardwright.sharding.strategies.generic import generic
from shardwright.sharding.strategies.gradients import join_layouts, reduce_gradients
from shardwright.sharding.strategies.manual import manual
from shardwright.sharding.strategies.splits import padding_of
from shardwright.sharding.strategies.state import place_batch, place_results

NAMED = 4  # padded weights that the note lists by name (our choice)
_DECIDE: Mapping[str, Callable[[Decisions, StrategySettings], None]] = {
    "fsdp": fsdp,
    "generic": generic,
    "llm-training": generic,
}
assert STRATEGIES.keys() == {*_DECIDE, MANUAL}, "every strategy has defaults and a function"


def recipe_of(
    graph: Graph,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    mesh: Mesh,
    settings: StrategySettings,
    user: ModuleShardings | None = None,
) -> Recipe:
    """Everything `settings.name` decides about a step; `user` is what its module says itself.

    Raises ShardingError.
    """
    name = settings.name
    if name == MANUAL:
        return manual(graph, inputs, outputs, mesh, user)
    decide = _DECIDE.get(name)
    if decide is None:
        raise ShardingError(
            "SW_STRATEGY",
            f"strategy.name requires one of {', '.join(STRATEGIES)}, got {name}",
            hint=did_you_mean(name, STRATEGIES),
        )
    free = WITHOUT_CONSTRAINTS(graph)
    decisions = Decisions(free, inputs, outputs, mesh)
    by_expert = mesh.sizes.get("ep", 1) > 1
    alike, notes = SORTED_ROWS(free, decisions.batch_dims(), by_expert=by_expert)
    decisions.graph = IOTA_DE_CSE(alike)
    decisions.findings += notes
    if free is not graph or (user is not None and user.meshes):
        decisions.findings.append(_not_read(name))
    decisions.read_graph()
    decisions.saves_gathered = not settings.reshard_after_forward
    decide(decisions, settings)
    _lay_out(decisions)
    return decisions.recipe()


RECIPE = Rewrite(
    "recipe",
    recipe_of,
    "what the strategy asks the partitioner for, value by value (`// constraint`)",
    besides="the role and name of every input and result",
    remark=shown.constraints,
)


def _lay_out(step: Decisions) -> None:
    """What follows from the choices of a strategy: where to gather, reduce and constrain."""
    place_batch(step)
    gather_operands(step)
    reduce_gradients(step)
    join_layouts(step)
    constrain_activations(step)
    place_results(step)


def padded_step(
    graph: Graph,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    mesh: Mesh,
    settings: StrategySettings,
) -> tuple[Graph, Sequence[Slot], Sequence[Slot], tuple[Diagnostic, ...]]:
    """A step in which `tp` divides the indices it would split, its slots, and a note about it."""
    if mesh.sizes.get("tp", 1) == 1 or settings.name == MANUAL:
        return graph, inputs, outputs, ()
    step = Decisions(WITHOUT_CONSTRAINTS(graph), inputs, outputs, mesh)
    step.read_graph()
    sizes = padding_of(step, settings)
    if not sizes:
        return graph, inputs, outputs, ()
    numbers = {slot.name: i for i, slot in enumerate(inputs)}
    same = {j: numbers[slot.name] for j, slot in enumerate(outputs) if slot.name in numbers}
    grown = PADDED(graph, sizes, step.layout.indices, same)
    note = _padded(inputs, graph, grown)
    return (
        grown,
        _own(inputs, graph.inputs, grown.inputs),
        _own(outputs, graph.outputs, grown.outputs),
        (note,),
    )


def _own(slots: Sequence[Slot], before: Sequence[Value], after: Sequence[Value]) -> list[Slot]:
    """Slots that keep the user's shape where the step's has grown."""
    rows = zip(slots, before, after, strict=True)
    return [s if a.type == b.type else replace(s, shape=a.type.shape) for s, a, b in rows]


def _padded(inputs: Sequence[Slot], before: Graph, after: Graph) -> Diagnostic:
    """The note about leaves that have grown."""
    rows = zip(inputs, before.inputs, after.inputs, strict=True)
    grown = [
        f"{s.name} {a.type} to {b.type}"
        for s, a, b in rows
        if a.type != b.type and s.role in WEIGHT_ROLES
    ]
    more = f" and {len(grown) - NAMED} more" if len(grown) > NAMED else ""
    return Diagnostic(
        "SW_TENSOR_PADDED",
        f"padded so that mesh.tp divides them: {', '.join(grown[:NAMED])}{more}",
        hint="set strategy.pad_uneven to false to keep them as they are, split less or whole",
        severity="note",
    )


def _not_read(name: str) -> Diagnostic:
    """The note about shardings that a strategy overrules."""
    return Diagnostic(
        "SW_MANUAL_UNREAD",
        f"the step has shardings of its own, which strategy {name} does not read",
        hint="use strategy manual to have them respected and completed",
        severity="note",
    )


def default_axes(name: str) -> dict[str, int | str]:
    """The mesh of a job that names none: every core data parallel, or in groups of as many
    tensor-parallel cores as the strategy takes.
    """
    cores = STRATEGIES[name].tensor
    tensor = {"tp": cores} if cores > 1 else {}
    return {"dp_shard": "auto", **tensor}
