"""Convolutions in groups: cores that share the groups out have fewer of them.

A dim that groups split is (group, element of the group), groups first; axes at its major end share
groups out, and axes behind them elements, once every core has one group. Elements of input features
are combined, those of a batch and of output features passed on, as where there are no groups
(`compiler/ir/ops/convolution.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.compiler.ir.factors import Place
from shardwright.compiler.ir.ops.convolution import grouped_dim, in_fewer_groups
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.localize.context import (
    Localizer,
    by_factors,
    check_factors,
    localizes,
    place_text,
    require_dims,
    require_whole,
)
from shardwright.sharding.partition.spec import num_shared


@localizes("convolution")
def _convolution(context: Localizer, op: Op) -> Sequence[Value]:
    """The same convolution of this core's groups."""
    split = grouped_dim(op.attrs)
    if split is None:
        return by_factors(context, op)
    a = op.attrs
    grouped: Place = (0, split)
    kernel, made = (1, a.rhs[0]), (2, a.out[1])
    inner: Place = (1, a.rhs[1]) if a.feature_groups > 1 else (2, a.out[0])
    values = (*op.operands, *op.results)
    axes = {place: context.dims(values[place[0]])[place[1]] for place in (grouped, kernel, made)}
    axes[inner] = context.dims(values[inner[0]])[inner[1]]
    _require_alike(context, op, (kernel, axes[kernel]), (made, axes[made]))
    shared = num_shared(axes[grouped], axes[kernel])
    ways = math.prod(context.mesh.sizes[axis] for axis in axes[grouped][:shared])
    groups = a.feature_groups * a.batch_groups
    if ways != groups:  # a core has several groups, or parts of some
        for place in (grouped, kernel):
            behind = axes[place][shared if groups % ways == 0 else 0 :]
            require_whole(context, op, place[1], behind, f"{groups} groups split it")
    _require_alike(context, op, (grouped, axes[grouped][shared:]), (inner, axes[inner]))
    check_factors(context, op, axes)
    return context.keep(op, in_fewer_groups(a, ways))


def _require_alike(
    context: Localizer,
    op: Op,
    one: tuple[Place, tuple[str, ...]],
    other: tuple[Place, tuple[str, ...]],
) -> None:
    """Refuse two dims that are not sharded over the same axes."""
    what = f"{place_text(op, *one[0])} and {place_text(op, *other[0])}"
    require_dims(context, op, what, "+".join(one[1]) or "none", "+".join(other[1]) or "none")
