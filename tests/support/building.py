"""A builder with the ops that only tests write by hand: collectives, ranks and barriers."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir import build
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    AllGatherAttrs,
    AllReduceAttrs,
    AllToAllAttrs,
    ReduceScatterAttrs,
)
from shardwright.compiler.ir.types import Value


class Builder(build.Builder):
    """One graph level under construction."""

    def nested(self, name: str) -> Builder:
        """A builder of a region of an op of this level."""
        return Builder(name, self.loc)

    def all_gather(self, a: Value, dim: int, axes: Sequence[str], group_size: int = 1) -> Value:
        """Concatenate shards along `dim`."""
        return self.op("all_gather", a, attrs=AllGatherAttrs(dim, tuple(axes), group_size))

    def all_reduce(
        self, a: Value, axes: Sequence[str], group_size: int = 1, reduction: str = "add"
    ) -> Value:
        """Reduce over the group."""
        return self.op("all_reduce", a, attrs=AllReduceAttrs(tuple(axes), reduction, group_size))

    def reduce_scatter(
        self, a: Value, dim: int, axes: Sequence[str], group_size: int = 1, reduction: str = "add"
    ) -> Value:
        """Reduce over the group and keep this rank's slice of `dim`."""
        attrs = ReduceScatterAttrs(dim, tuple(axes), reduction, group_size)
        return self.op("reduce_scatter", a, attrs=attrs)

    def all_to_all(
        self, a: Value, split_dim: int, concat_dim: int, axes: Sequence[str], group_size: int = 1
    ) -> Value:
        """Split one dim over the group, concatenate along the other."""
        attrs = AllToAllAttrs(split_dim, concat_dim, tuple(axes), group_size)
        return self.op("all_to_all", a, attrs=attrs)

    def barrier(self, *values: Value) -> tuple[Value, ...]:
        """`optimization_barrier`."""
        return self.append(make_op("optimization_barrier", values, loc=self.loc))
