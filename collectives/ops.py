"""What is communicated: kinds, groups, and how groups follow from mesh axes.

Groups stay symbolic (axis names) until a schedule needs ranks. Rank order inside a group is
row-major over the named axes in mesh order, which is also the order in which chunks are
concatenated and scattered.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TORUS, LINEAR = "torus", "linear"
"""Names of placements (`placement.py`), beside those that list axes."""


class CollectiveError(ValueError):
    """A collective was asked for that cannot be: empty group, unknown axis, size that does not
    divide."""


class CollectiveKind(enum.Enum):
    """The collectives of the IR, the tile programs and the network, under their StableHLO names."""

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    COLLECTIVE_PERMUTE = "collective_permute"


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """A partition of ranks into groups of equal size, each in group order."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks per group."""
        return len(self.groups[0])

    @classmethod
    def from_axes(cls, mesh: Mapping[str, int], axes: Sequence[str]) -> ReplicaGroups:
        """Groups over `axes` of a row-major mesh (first axis major).

        Raises CollectiveError for an axis the mesh does not have.
        """
        missing = [a for a in axes if a not in mesh]
        if missing:
            raise CollectiveError(
                f"replica groups need axes of the mesh {dict(mesh)}, got {missing}"
            )
        offsets = _offsets(mesh, [a for a in mesh if a in axes])
        bases = _offsets(mesh, [a for a in mesh if a not in axes])
        return cls(tuple(tuple(base + o for o in offsets) for base in bases))


def _offsets(mesh: Mapping[str, int], axes: Sequence[str]) -> list[int]:
    """Linear rank offsets of all coordinates along `axes`, row-major."""
    strides = axis_strides(mesh)
    offsets = [0]
    for axis in axes:
        offsets = [o + i * strides[axis] for o in offsets for i in range(mesh[axis])]
    return offsets


def axis_strides(mesh: Mapping[str, int]) -> dict[str, int]:
    """Rank distance between neighbours along each axis of a row-major mesh."""
    names = list(mesh)
    return {a: math.prod(mesh[b] for b in names[i + 1 :]) for i, a in enumerate(names)}


def group_index(mesh: Mapping[str, int], axes: Sequence[str], rank: int) -> int:
    """Position of `rank` in its group over `axes` (row-major over the axes in the order given)."""
    strides = axis_strides(mesh)
    index = 0
    for axis in axes:
        index = index * mesh[axis] + rank // strides[axis] % mesh[axis]
    return index


def positions(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Position of `rank` along every axis."""
    return {axis: group_index(mesh, (axis,), rank) for axis in mesh}
