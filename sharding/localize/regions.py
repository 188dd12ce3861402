"""Code of one rank in its place: `manual_region` ops of a localized graph become the ops of their
regions, as the user wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.compiler.ir.ops import ManualRegionAttrs
from shardwright.compiler.ir.rewrite import Level, with_ops, with_regions
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.passes.remat.recipes import copied
from shardwright.sharding.partition.mesh import Mesh


def in_place(graph: Graph, regions: Sequence[Graph], mesh: Mesh) -> Graph:
    """The program of one rank with `regions` where `graph` names them, over the axes that `mesh`
    has of theirs.
    """
    level = Level()
    for old in graph.ops:
        op = level.update(old)
        if isinstance(op.attrs, ManualRegionAttrs):
            region = _over(mesh, copied(regions[op.attrs.number]))
            level.replace(region.inputs, op.operands)
            level.ops += map(level.update, region.ops)
            level.replace(op.results, tuple(map(level.now, region.outputs)))
        else:
            inside = tuple(in_place(body, regions, mesh) for body in op.regions)
            level.ops.append(with_regions(op, inside))
    return level.finish(graph)


def _over(mesh: Mesh, region: Graph) -> Graph:
    """`region` with its collectives over the parts that the partitioner cut their axes into."""
    if not mesh.origins:
        return region
    ops = []
    for old in region.ops:
        op = with_regions(old, tuple(_over(mesh, body) for body in old.regions))
        axes = getattr(op.attrs, "axes", None)
        if axes is not None:
            parts = tuple(part for axis in axes for part in mesh.atoms(axis))
            attrs = replace(op.attrs, axes=parts)
            op = Op(op.name, op.operands, op.results, attrs, op.regions, op.loc)
        ops.append(op)
    return with_ops(region, ops)
