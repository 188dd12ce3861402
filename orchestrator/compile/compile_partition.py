"""A model file that asks for partitions: its own shardings, completed and applied.

JAX writes the mesh, the shardings and `mhlo.num_partitions` into a module that nobody has
partitioned yet. Such a file is partitioned as strategy `manual` partitions a step, and compiled as
the program of one rank of many, like a file that XLA's partitioner wrote. What it has of code of
one rank (`shard_map`) stands in that program as it was written.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.frontend.detect import Module
from shardwright.compiler.ir.types import Graph
from shardwright.sharding.cut.rewrites import LOCALIZED, MANUAL_REGIONS, PARTITIONED, REWRITTEN
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.settings import MANUAL, StrategySettings
from shardwright.sharding.strategies.manual import user_mesh
from shardwright.sharding.strategies.registry import RECIPE


def buffer_names(graph: Graph, module: Module) -> tuple[list[str], list[str]]:
    """Names of the inputs and outputs of a file: its own, else `arg0...` and `out0...`; an output
    that takes over an input has the input's."""
    if module.arguments:
        return list(module.arguments), list(module.results)
    aliases = module.facts.aliases
    owners = dict(aliases)
    made = [f"arg{owners[k]}" if k in owners else f"out{k}" for k in range(len(graph.outputs))]
    return [f"arg{k}" for k in range(len(graph.inputs))], made


def with_partitions(graph: Graph, module: Module) -> tuple[Graph, Module]:
    """The program of one rank and the facts of its file; both as they are for a file that asks for
    no partitions. Raises: ShardingError for axes that do not divide their dims, and as the
    partitioner does."""
    asked = module.facts.shardings
    if asked is None:
        return graph, module
    given, made = buffer_names(graph, module)
    inputs = tuple(Slot(name, "parameter") for name in given)
    outputs = tuple(Slot(name, "parameter" if name in given else "metric") for name in made)
    settings = StrategySettings(name=MANUAL)
    recipe = RECIPE(graph, inputs, outputs, user_mesh(asked), settings, asked)
    whole = (recipe.graph, recipe.mesh, recipe.specs, inputs, outputs, recipe.tied)
    part = REWRITTEN(PARTITIONED(*whole))
    local, regions = LOCALIZED(part).graph, module.facts.regions
    if regions:
        local = MANUAL_REGIONS(local, regions, part.mesh)
    facts = replace(module.facts, mesh=part.mesh.axes, shardings=None)
    return local, replace(module, facts=facts)
