"""The strategies by name: one row per file, and the one road through all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compiler.diagnostics import ShardingError
from compiler.ir.types import Graph
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
from sharding.strategies.state import place_batch, place_results

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
) -> Recipe:
    """Everything `settings.name` decides about a step. Raises ShardingError."""
    decide = STRATEGIES.get(settings.name.lower().replace("_", "-"))
    if decide is None:
        raise ShardingError(
            "SW_STRATEGY",
            f"strategy.name requires one of {', '.join(STRATEGIES)}, got {settings.name}",
        )
    stages = mesh.sizes.get("pp", 1)
    if stages > 1:
        raise ShardingError(
            "SW_PIPELINE",
            f"mesh.pp requires 1 for now, got {stages}: a step is not cut into stages yet",
            hint="use tp and dp_shard instead",
        )
    step = Decisions(graph, inputs, outputs, mesh)
    step.read_graph()
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


def default_axes(name: str) -> dict[str, int | str]:
    """The mesh of a job that names none: every core data parallel; under llm-training groups of 8
    tensor-parallel cores (DESIGN.md section 5).
    """
    tensor = {"tp": 8} if name == "llm-training" else {}
    return {"dp_shard": "auto", **tensor}
