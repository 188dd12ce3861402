"""Schedules of algorithms in tiers: one along every side of a grid of ranks, tier after tier.

all_gather runs from the outermost tier (across instances) to the innermost (inside a chip),
reduce_scatter the other way, all_reduce scatters and then gathers. Hierarchical algorithms have a
tier across instances; recursive doubling and the grouped mesh of one instance have one between
chips and one inside of them. Tiers run one after the other: the documented pipeline between them is
not modelled, large messages take the flat ring instead. Source: documented: intra- and inter-node
collectives pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.collectives.algorithms.algorithm import Moves
from shardwright.collectives.algorithms.table import ALGORITHMS
from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.schedule import Charge, Phase, Schedule, halves
from shardwright.collectives.topology import IntArray


def tiers(
    kind: CollectiveKind,
    grid: IntArray,
    patterns: Sequence[str],
    rings: Sequence[Sequence[int]] = (),
    algorithm: str = "hierarchical",
) -> Schedule:
    """all_gather, reduce_scatter or all_reduce of the positions in `grid`, one side per tier.

    `patterns` name what runs along each side. `rings` are orders of the last side, one part of
    every chunk each; all other sides run in index order.
    Raises CollectiveError when the orders are not of the last side, or an algorithm does not run
    over as many.
    """
    whole = list(range(grid.shape[-1]))
    if any(sorted(order) != whole for order in rings):
        raise CollectiveError("rings of one collective require the same ranks, got different sets")
    parts = len(rings) or 1
    phases: list[Phase] = []
    for reduces, side in runs(kind, grid.shape):
        orders = rings if rings and side == grid.ndim - 1 else [range(grid.shape[side])] * parts
        name = f"{'scatter' if reduces else 'gather'} along {side}"
        phases += _phases(patterns[side], _lanes(grid, side, orders), name, reduces=reduces)
    return Schedule(kind, algorithm, grid.size, parts, tuple(phases))


def runs(kind: CollectiveKind, sides: Sequence[int]) -> Iterator[tuple[bool, int]]:
    """What runs one after the other: whether it reduces, and along which side of more than one."""
    numbers = [side for side, size in enumerate(sides) if size > 1]
    for reduces in halves(kind):
        for side in reversed(numbers) if reduces else numbers:
            yield reduces, side


@dataclass(frozen=True, slots=True, eq=False)
class _Lanes:
    """Sub-groups that run the same pattern side by side, each on its own share of the chunks.

    Shapes: `order` [lanes, members] positions; `owners` [lanes, members, width] whose chunks a
    member stands for; `part` [lanes] of the chunks, of `parts` in all.
    """

    order: IntArray
    owners: IntArray
    part: IntArray
    parts: int

    def place(self, moves: Moves) -> Moves:
        """Flat (source, target, chunk) of member indices [moves], all lanes and owners of each."""
        source, target, owner = moves
        chunk = self.owners[:, owner] * self.parts + self.part[:, None, None]
        wide = chunk.shape
        source = np.broadcast_to(self.order[:, source][:, :, None], wide)
        target = np.broadcast_to(self.order[:, target][:, :, None], wide)
        return source.ravel(), target.ravel(), chunk.ravel()


def _lanes(grid: IntArray, side: int, orders: Sequence[Sequence[int]]) -> _Lanes:
    """One lane per part and place on the other sides; a member stands for all that have the same
    place on its own side and the inner ones."""
    parts, size = len(orders), grid.shape[side]
    outer = int(np.prod(grid.shape[:side], dtype=np.int64))
    table = grid.reshape(outer, size, -1)
    inner = table.shape[2]
    placed = table[:, np.array(orders, dtype=np.int64)]  # outer, part, member, inner
    order = placed.transpose(1, 0, 3, 2).reshape(-1, size)
    owners = placed.transpose(1, 3, 2, 0)[:, None]  # part, 1, inner, member, outer
    owners = np.broadcast_to(owners, (parts, outer, inner, size, outer))
    part = np.repeat(np.arange(parts), outer * inner)
    return _Lanes(order, owners.reshape(-1, size, outer), part, parts)


def _phases(pattern: str, lanes: _Lanes, name: str, *, reduces: bool) -> Iterator[Phase]:
    """One phase for all steps along the same permutation; what is duplicated is no sum."""
    for steps, moves in ALGORITHMS[pattern].moves(lanes.order.shape[1], reduces=reduces):
        placed = [lanes.place(step) for step in moves]
        starts = np.cumsum([0, *(len(source) for source, _, _ in placed)], dtype=np.int64)
        empty = np.zeros(0, dtype=np.int64)
        source, target, chunk = (np.concatenate([empty, *(p[i] for p in placed)]) for i in range(3))
        label = f"{name}: {steps.name}" if steps.name else name
        adds = reduces and steps.charge is not Charge.WRITE
        yield Phase(label, source, target, chunk, starts, adds, steps.charge)
