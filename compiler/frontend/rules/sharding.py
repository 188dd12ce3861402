"""Constraints on where a value lives, as JAX writes them: `sdy.sharding_constraint`, by axis names.

They stay ops until partitioning. GSPMD's older annotations are in `gspmd.py`.
"""

from __future__ import annotations

from typing import Any

from shardwright.compiler.frontend.rules.registry import Site, Values, imports, refuse
from shardwright.compiler.ir.ops import ShardingConstraintAttrs


@imports("sdy.sharding_constraint")
def sharding_constraint(site: Site) -> Values:
    """The user's constraint."""
    attrs = site.decode("sharding", constraint_attrs)
    return site.emit("sharding_constraint", site.operands, attrs).results


def constraint_attrs(attribute: Any) -> ShardingConstraintAttrs:
    """A sharding by axis names. Refuses parts of axes, and values that are still sums of parts."""
    from jaxlib.mlir.dialects import sdy

    sharding = sdy.TensorShardingAttr(attribute)
    dims = [sdy.DimensionShardingAttr(d) for d in sharding.dimension_shardings]
    axes = [[sdy.AxisRefAttr(a) for a in d.axes] for d in dims]
    if any(a.sub_axis_info is not None for of_dim in axes for a in of_dim):
        refuse(
            "SW_CONSTRAINT",
            f"sharding constraints require whole mesh axes, got {attribute}",
            "split the mesh axis in two",
        )
    if list(sharding.unreduced_axes):
        refuse(
            "SW_CONSTRAINT",
            f"sharding constraints require reduced values, got {attribute}",
            "leave the reduction to the partitioner",
        )
    spec = tuple(tuple(a.name for a in of_dim) for of_dim in axes)
    return ShardingConstraintAttrs(spec, tuple(i for i, d in enumerate(dims) if not d.is_closed))
