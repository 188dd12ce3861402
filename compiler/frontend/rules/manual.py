"""Code of one rank in a step of whole values: `shard_map`, which Shardy calls a manual computation.

A file that asks for partitions by its own shardings keeps such a part as it is written: its
operands and results are laid out as it says, and its collectives stay those of its mesh. HLO's
spelling of it becomes Shardy's (`frontend/shardy_hlo.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from shardwright.compiler.frontend.rules.process_groups import MeshAxes
from shardwright.compiler.frontend.rules.ranks import MANUAL
from shardwright.compiler.frontend.rules.registry import Scope, Site, Values, imports, refuse
from shardwright.compiler.frontend.rules.sharding import constraint_attrs
from shardwright.compiler.ir.ops import ManualRegionAttrs, ShardingConstraintAttrs
from shardwright.compiler.ir.types import Graph, Value

_AXIS = re.compile(r'"([^"]+)"')
_WHOLE_HINT = "give it to the compile command; a JAX step with shard_map is taken by plan and run"
_HINT = (
    "compile what XLA's partitioner makes of the module (the dump after spmd-partitioning); a JAX"
    " step with shard_map is taken by plan and run"
)


@imports(MANUAL)
def manual_computation(site: Site) -> Values:
    """A region of its own, between the layouts of its operands and results."""
    regions = site.importer.regions
    if regions is None:
        required = "requires a file whose one rank is compiled, got one of a whole step"
        refuse("NCC_EVRF001", f"shard_map ({MANUAL}) {required}", _WHOLE_HINT)
    axes = _mesh(site)
    ranks = replace(site.importer.ranks, axes=axes, is_known=True)
    (block,) = site.op.regions[0].blocks
    inputs = tuple(Value(site.importer.type_of(argument.type)) for argument in block.arguments)
    scope = Scope(parent=site.scope)
    outputs = site.importer.of_rank(ranks).block(site.op, block, scope, inputs)
    captured = tuple(capture.inner for capture in scope.captures)
    outside = tuple(capture.outer for capture in scope.captures)
    regions.append(Graph((*inputs, *captured), tuple(scope.ops), outputs))

    given = [*_layouts(site, "in_shardings"), *map(_whole, outside)]
    placed = [
        site.emit("sharding_constraint", (value,), ShardingConstraintAttrs(spec)).result
        for value, spec in zip((*site.operands, *outside), given, strict=True)
    ]
    made = tuple(_layouts(site, "out_shardings"))
    attrs = ManualRegionAttrs(len(regions) - 1, tuple(site.result_types()), made)
    return site.emit("manual_region", placed, attrs).results


def _mesh(site: Site) -> MeshAxes:
    """The axes of the mesh that the region is written for: all of those of the module."""
    meshes = {mesh for mesh in site.importer.ranks.meshes.values() if mesh[0]}
    manual = {*_AXIS.findall(str(site.op.attributes["manual_axes"]))}
    if len(meshes) != 1:
        refuse("NCC_EVRF001", f"shard_map requires a module of one mesh, got {len(meshes)}", _HINT)
    ((axes, order),) = meshes
    automatic = [name for name, size in axes if size > 1 and name not in manual]
    if automatic or order:
        got = f"{' and '.join(automatic)} left to the partitioner" if automatic else "an own order"
        required = "requires all axes of its mesh, in the order of the cores"
        refuse("NCC_EVRF001", f"shard_map {required}, got {got}", _HINT)
    grid, count = site.importer.ranks.grid, math.prod(size for _, size in axes)
    if (grid.replicas, grid.partitions) != (1, count):
        required = f"as many partitions as its mesh has cores, {count} (mhlo.num_partitions)"
        got = f"{grid.partitions} of {grid.replicas} replicas"
        refuse(
            "NCC_EVRF001",
            f"shard_map requires {required}, got {got}",
            "lower the step for a mesh of devices (an AbstractMesh has none), or " + _HINT,
        )
    return axes


def _layouts(site: Site, name: str) -> list[tuple[tuple[str, ...], ...]]:
    """Per operand or result, the axes per dim."""
    from jaxlib.mlir.dialects import sdy

    given: Any = sdy.TensorShardingPerValueAttr(site.op.attributes[name])
    return [constraint_attrs(one).spec for one in given.shardings]


def _whole(value: Value) -> tuple[tuple[str, ...], ...]:
    """The layout of a value that every rank has."""
    return ((),) * value.type.rank
