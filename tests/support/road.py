"""The road from a task to a step plan, and the comparison with the unsharded step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from shardwright.compiler.frontend.capture import Captured, capture
from shardwright.compiler.frontend.reference import (
    batch_leaves,
    initial_state,
    reference_step,
    task_batches,
)
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.program import StepPlan
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies import Recipe
from shardwright.sharding.strategies.registry import recipe_of
from shardwright.sim_cluster.values.result import distance as leaf_error
from tests.support.partitioned import partition_here
from tests.support.reference_ranks import ReferenceRanks
from tests.support.step_plans import build_plan


def captured_graph(
    task: TrainTask, samples: int
) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    """The global graph of a step on `samples` samples, and its slots."""
    captured: Captured = capture(task, samples)
    inputs, outputs = (
        tuple(Slot(i.name, i.role, i.batch_dim) for i in infos)
        for infos in (captured.inputs, captured.outputs)
    )
    return import_module(captured.artifact), inputs, outputs


def fsdp(graph: Graph, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...], mesh: Mesh) -> Recipe:
    """The fsdp recipe with its defaults."""
    return recipe_of(graph, inputs, outputs, mesh, StrategySettings())


def fsdp_partition(task: TrainTask, mesh: Mesh, samples: int) -> PartitionedGraph:
    """The step under the fsdp recipe, partitioned in this process."""
    graph, inputs, outputs = captured_graph(task, samples)
    recipe = fsdp(graph, inputs, outputs, mesh)
    return rewrite(partition_here(recipe.graph, mesh, recipe.specs, inputs, outputs))


def fsdp_plan(
    task: TrainTask, mesh: Mesh, micro_batch: int, num_microbatches: int = 1, **settings: bool
) -> Plan:
    """The planned step, partitioned in this process; `micro_batch` samples per core."""
    graph, inputs, outputs = captured_graph(task, micro_batch * mesh.num_cores)
    return build_plan(
        graph,
        inputs,
        outputs,
        mesh,
        num_microbatches=num_microbatches,
        unit=answer_request,
        settings=StrategySettings(**settings),
    )


def run_and_compare(
    plan: StepPlan, task: TrainTask, steps: int = 1, seed: int = 0
) -> tuple[dict[str, float], ReferenceRanks]:
    """Errors per leaf after `steps` steps on ranks, against the unsharded step."""
    batch = next(i for i in plan.buffers.values() if i.role == "batch")
    samples = batch.global_type.shape[0]
    batches = task_batches(task, seed, samples * plan.num_microbatches)
    state = initial_state(task, seed)
    ranks = ReferenceRanks(plan, state)
    expected: Mapping[str, np.ndarray] = state
    for whole in itertools.islice(batches, steps):
        expected = reference_step(task, expected, whole)
        ranks.run_step(split_batch(batch_leaves(whole), samples))
    kept = (info for info in plan.buffers.values() if info.role != "batch")
    held = {info.part.leaf if info.part else info.name for info in kept}
    leaves = {leaf for name in held for leaf in plan.stacks.get(name, (name,))}
    errors = {
        name: leaf_error(ranks.gather(name), expected[name])
        for name in sorted(leaves & set(expected))
    }
    assert set(errors) == set(expected)
    return errors, ranks


def split_batch(leaves: Mapping[str, np.ndarray], samples: int) -> list[dict[str, np.ndarray]]:
    """The micro-batches of a batch, along dim 0."""
    count = next(iter(leaves.values())).shape[0] // samples
    return [
        {name: leaf[i * samples : (i + 1) * samples] for name, leaf in leaves.items()}
        for i in range(count)
    ]


def worst(errors: Mapping[str, float]) -> tuple[str, float]:
    """The leaf with the largest error."""
    return max(errors.items(), key=lambda item: item[1])
