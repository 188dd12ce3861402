"""How one value is laid over the mesh: the axes that shard each dim, and the axes it is still a
partial sum over.

A spec is small, frozen and hashable, so that graphs carry one per value and the files compare them.
It names axes only; sizes belong to `mesh.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Mesh axes per dim, major to minor; `unreduced` axes hold partial sums that still have to be
    added.
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)  # looked up per value and pass

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dims, self.unreduced)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardingSpec, (self.dims, self.unreduced)  # names hash otherwise elsewhere

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that shards some dim, in dim order."""
        return tuple(axis for dim in self.dims for axis in dim)

    def with_dim(self, dim: int, axes: Iterable[str]) -> ShardingSpec:
        """The same spec with `dim` sharded by `axes`."""
        dims = (*self.dims[:dim], tuple(axes), *self.dims[dim + 1 :])
        return ShardingSpec(dims, self.unreduced)

    def local_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape per core. Raises ValueError when an axis product does not divide its dim."""
        return tuple(
            _local_dim(n, math.prod(sizes[a] for a in axes), i)
            for i, (n, axes) in enumerate(zip(shape, self.dims, strict=True))
        )

    def __str__(self) -> str:
        dims = ", ".join("+".join(axes) or "-" for axes in self.dims)
        partial = f" partial over {'+'.join(self.unreduced)}" if self.unreduced else ""
        return f"[{dims}]{partial}"


def _local_dim(size: int, ways: int, dim: int) -> int:
    """`size / ways`, exactly."""
    if size % ways:
        raise ValueError(f"dim {dim} requires a multiple of {ways}, got {size}")
    return size // ways


def replicated(rank: int) -> ShardingSpec:
    """The spec of a value that every core holds whole."""
    return ShardingSpec(((),) * rank)


def sharded(rank: int, dim: int, axes: Iterable[str]) -> ShardingSpec:
    """The spec of a value with one sharded dim."""
    return replicated(rank).with_dim(dim, axes)


def num_shared(names: Sequence[str], others: Sequence[str]) -> int:
    """How many names two lists begin with alike: axes of a dim, parts of a path."""
    pairs = zip(names, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
