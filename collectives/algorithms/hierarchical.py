"""Hierarchical algorithms: one level inside each instance, one across instances.

all_gather runs across, then inside; reduce_scatter inside, then across; all_reduce scatters inside,
reduces across and gathers inside. Levels run one after the other: the documented three-stage
pipeline between them is not modelled, large messages take the flat ring instead. Source:
documented: inter-node collectives page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.algorithms import mesh, recursive, ring
from collectives.algorithms.lanes import Lanes
from collectives.ops import CollectiveKind
from collectives.schedule import Phase, Schedule
from collectives.topology import IntArray


def hierarchical(
    kind: CollectiveKind,
    grid: Sequence[Sequence[int]],
    rings: Sequence[Sequence[int]],
    *,
    inside: str,
    across: str,
) -> Schedule:
    """all_gather, reduce_scatter or all_reduce of the positions `grid[instance][local index]`.

    `inside` is "ring" (over `rings`, orders of local indices, one part each) or "mesh" (one part);
    `across` is "ring" or "recursive" (instances a power of two).
    """
    table = np.array(grid, dtype=np.int64)
    near = _inside_lanes(table, np.array(rings if inside == "ring" else rings[:1], dtype=np.int64))
    far = _across_lanes(table, near.parts)
    phases: list[Phase] = []
    if kind is not CollectiveKind.ALL_GATHER:
        phases += _scatter(inside, near, "scatter inside") + _scatter(across, far, "scatter across")
    if kind is not CollectiveKind.REDUCE_SCATTER:
        phases += _gather(across, far, "gather across") + _gather(inside, near, "gather inside")
    return Schedule(kind, "hierarchical", table.size, near.parts, tuple(phases))


def _inside_lanes(grid: IntArray, rings: IntArray) -> Lanes:
    """One lane per (part, instance); a local index stands for the owners with that index on all
    instances."""
    parts, instances = len(rings), len(grid)
    order = grid[:, rings].transpose(1, 0, 2).reshape(parts * instances, -1)
    owners = np.repeat(grid.T[rings], instances, axis=0)
    return Lanes(order, owners, np.repeat(np.arange(parts), instances), parts)


def _across_lanes(grid: IntArray, parts: int) -> Lanes:
    """One lane per (part, local index); every member stands for itself."""
    order = np.tile(grid.T, (parts, 1))
    part = np.repeat(np.arange(parts), grid.shape[1])
    return Lanes(order, order[:, :, None], part, parts)


def _gather(how: str, lanes: Lanes, name: str) -> list[Phase]:
    if how == "recursive":
        return recursive.gather_phases(lanes, name)
    return [mesh.gather_phase(lanes, name) if how == "mesh" else ring.gather_phase(lanes, name)]


def _scatter(how: str, lanes: Lanes, name: str) -> list[Phase]:
    if how == "recursive":
        return recursive.scatter_phases(lanes, name)
    return [mesh.scatter_phase(lanes, name) if how == "mesh" else ring.scatter_phase(lanes, name)]
