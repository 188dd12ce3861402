"""A model file that asks for partitions: its own shardings, completed and applied.

JAX writes the mesh, the shardings and `mhlo.num_partitions` into a module that nobody has
partitioned yet. Such a file is partitioned as strategy `manual` partitions a step, and compiled as
the program of one rank of many, like a file that XLA's partitioner wrote.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.frontend.detect import Module
from shardwright.compiler.ir.types import Graph
from shardwright.sharding.cut.rewrites import LOCALIZED, PARTITIONED, REWRITTEN
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.settings import MANUAL, StrategySettings
from shardwright.sharding.strategies.manual import user_mesh
from shardwright.sharding.strategies.registry import RECIPE


def with_partitions(graph: Graph, module: Module) -> tuple[Graph, Module]:
    """The program of one rank and the facts of its file; both as they are for a file that asks for
    no partitions. Raises: ShardingError for axes that do not divide their dims, and as the
    partitioner does."""
    asked = module.facts.shardings
    if asked is None:
        return graph, module
    owners = dict(module.facts.aliases)
    inputs = tuple(Slot(f"arg{k}", "parameter") for k in range(len(graph.inputs)))
    outputs = tuple(
        Slot(f"arg{owners[k]}", "parameter") if k in owners else Slot(f"out{k}", "metric")
        for k in range(len(graph.outputs))
    )
    settings = StrategySettings(name=MANUAL)
    recipe = RECIPE(graph, inputs, outputs, user_mesh(asked), settings, asked)
    whole = (recipe.graph, recipe.mesh, recipe.specs, inputs, outputs, recipe.tied)
    part = REWRITTEN(PARTITIONED(*whole))
    facts = replace(module.facts, mesh=part.mesh.axes, shardings=None)
    return LOCALIZED(part).graph, replace(module, facts=facts)
