"""The strategies by name: one row per file, and the one road through all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compiler.diagnostics import Diagnostic, ShardingError
from compiler.frontend.shardings import ModuleShardings
from compiler.ir.types import Graph
from compiler.passes.barriers import without_constraints
from sharding.counts import own_counts
from sharding.mesh import Mesh
from sharding.partitioned import Slot
from sharding.settings import StrategySettings
from sharding.strategies import Recipe
from sharding.strategies.activations import (
    gather_sequences,
    gather_weights,
    pin_activations,
    return_rows,
)
from sharding.strategies.decisions import Decisions
from sharding.strategies.fsdp import fsdp
from sharding.strategies.generic import generic
from sharding.strategies.gradients import join_layouts, reduce_gradients
from sharding.strategies.llm_training import llm_training
from sharding.strategies.manual import manual
from sharding.strategies.state import place_batch, place_results

MANUAL = "manual"
"""The strategy that reads the step's own shardings, on the mesh they name."""
STRATEGIES: Mapping[str, Callable[[Decisions, StrategySettings], None]] = {
    "fsdp": fsdp,
    "generic": generic,
    "llm-training": llm_training,
}


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
    name = settings.name.lower().replace("_", "-")
    if name == MANUAL:
        return manual(graph, inputs, outputs, mesh, user)
    decide = STRATEGIES.get(name)
    if decide is None:
        raise ShardingError(
            "SW_STRATEGY",
            f"strategy.name requires one of {', '.join((*STRATEGIES, MANUAL))}, "
            f"got {settings.name}",
        )
    free = without_constraints(graph)
    step = Decisions(own_counts(free), inputs, outputs, mesh)
    if free is not graph or (user is not None and user.meshes):
        step.findings.append(_not_read(name))
    step.read_graph()
    step.keep_gathered = not settings.reshard_after_forward
    decide(step, settings)
    _lay_out(step)
    return step.recipe()


def _lay_out(step: Decisions) -> None:
    """What follows from the choices of a strategy: where to gather, reduce, and pin."""
    place_batch(step)
    gather_weights(step)
    gather_sequences(step)
    return_rows(step)
    reduce_gradients(step)
    join_layouts(step)
    pin_activations(step)
    place_results(step)


def _not_read(name: str) -> Diagnostic:
    """The note about shardings that a strategy overrules."""
    return Diagnostic(
        "SW_MANUAL_UNREAD",
        f"the step has shardings of its own, which strategy {name} does not read",
        hint="use strategy manual to have them respected and completed",
        severity="note",
    )


def default_axes(name: str) -> dict[str, int | str]:
    """The mesh of a job that names none: every core data parallel; under llm-training groups of 8
    tensor-parallel cores (DESIGN.md section 5).
    """
    tensor = {"tp": 8} if name == "llm-training" else {}
    return {"dp_shard": "auto", **tensor}
