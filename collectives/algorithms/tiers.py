"""Algorithms in tiers: a pattern along every side of a grid of ranks, one tier after the other.

all_gather runs from the outermost tier (across instances) to the innermost (inside a chip),
reduce_scatter the other way, all_reduce scatters and then gathers. Hierarchical algorithms have a
tier across instances; recursive doubling and the grouped mesh of one instance have one between
chips and one inside of them. Tiers run one after the other: the documented pipeline between them is
not modelled, large messages take the flat ring instead. Source: documented: intra- and inter-node
collectives pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.collectives.algorithms import kangaring, mesh, recursive, ring
from shardwright.collectives.algorithms.lanes import Lanes
from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.schedule import Phase, Schedule
from shardwright.collectives.topology import IntArray

RINGS = ("ring", "kangaring")  # patterns that follow an order, one part of every chunk each


def tiers(
    kind: CollectiveKind,
    grid: IntArray,
    patterns: Sequence[str],
    rings: Sequence[Sequence[int]] = (),
    algorithm: str = "hierarchical",
) -> Schedule:
    """all_gather, reduce_scatter or all_reduce of the positions in `grid`, one side per tier.

    `patterns` name what runs along each side: `ring`, `mesh`, `recursive` (sides that are powers of
    two) or, along the last side, `kangaring`. `rings` are orders of the last side, for a ring or
    kangaring along it; other rings run in index order.
    """
    parts = num_parts(patterns, rings)
    orders = np.array(rings, dtype=np.int64) if patterns[-1] in RINGS and len(rings) else None
    sides = [side for side, size in enumerate(grid.shape) if size > 1]
    phases: list[Phase] = []
    if kind is not CollectiveKind.ALL_GATHER:
        for side in reversed(sides):
            lanes = _lanes(grid, side, parts, orders)
            phases += _scatter(patterns[side], lanes, f"scatter along {side}")
    if kind is not CollectiveKind.REDUCE_SCATTER:
        for side in sides:
            lanes = _lanes(grid, side, parts, orders)
            phases += _gather(patterns[side], lanes, f"gather along {side}")
    return Schedule(kind, algorithm, grid.size, parts, tuple(phases))


def num_parts(patterns: Sequence[str], rings: Sequence[Sequence[int]]) -> int:
    """Pieces every chunk is cut into: one per ring of the last side."""
    return max(1, len(rings)) if patterns[-1] in RINGS else 1


def _lanes(grid: IntArray, side: int, parts: int, rings: IntArray | None) -> Lanes:
    """One lane per part and place on the other sides; a member stands for all that have the same
    place on its own side and the inner ones.
    """
    outer = int(np.prod(grid.shape[:side], dtype=np.int64))
    size = grid.shape[side]
    table = grid.reshape(outer, size, -1)
    inner = table.shape[2]
    last = side == grid.ndim - 1
    orders = np.tile(np.arange(size), (parts, 1)) if rings is None or not last else rings
    placed = table[:, orders]  # outer, part, member, inner
    order = placed.transpose(1, 0, 3, 2).reshape(-1, size)
    owners = placed.transpose(1, 3, 2, 0)[:, None]  # part, 1, inner, member, outer
    owners = np.broadcast_to(owners, (parts, outer, inner, size, outer))
    part = np.repeat(np.arange(parts), outer * inner)
    return Lanes(order, owners.reshape(-1, size, outer), part, parts)


def _gather(pattern: str, lanes: Lanes, name: str) -> list[Phase]:
    if pattern == "recursive":
        return recursive.gather_phases(lanes, name)
    if pattern == "kangaring":
        return kangaring.gather_phases(lanes, name)
    return [mesh.gather_phase(lanes, name) if pattern == "mesh" else ring.gather_phase(lanes, name)]


def _scatter(pattern: str, lanes: Lanes, name: str) -> list[Phase]:
    if pattern == "recursive":
        return recursive.scatter_phases(lanes, name)
    if pattern == "kangaring":
        return kangaring.scatter_phases(lanes, name)
    own = mesh if pattern == "mesh" else ring
    return [own.scatter_phase(lanes, name)]
