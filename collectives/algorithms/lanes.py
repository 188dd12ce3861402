"""Lanes: sub-groups that run the same pattern side by side, each on its own share of the chunks.

A lane is an order of positions, the chunk owners each of its members stands for, and the part
(channel) it carries. A multi-ring is several lanes over the same ranks; a hierarchical phase has
one lane per instance or per local index. The algorithm files place moves for all lanes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.collectives.ops import CollectiveError
from shardwright.collectives.schedule import Charge, Phase
from shardwright.collectives.topology import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Shapes: `order` [lanes, members] positions; `owners` [lanes, members, width]; `part` [lanes];
    `parts` in all."""

    order: IntArray
    owners: IntArray
    part: IntArray
    parts: int

    @property
    def members(self) -> int:
        """Ranks of one lane."""
        return int(self.order.shape[1])

    def moves(
        self, source: IntArray, target: IntArray, owner: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Flat (source, target, chunk) of member indices [moves], all lanes and owners of each."""
        chunk = self.owners[:, owner] * self.parts + self.part[:, None, None]
        wide = chunk.shape
        source = np.broadcast_to(self.order[:, source][:, :, None], wide)
        target = np.broadcast_to(self.order[:, target][:, :, None], wide)
        return source.ravel(), target.ravel(), chunk.ravel()


def flat_lanes(orders: Sequence[Sequence[int]]) -> Lanes:
    """One lane per order over the whole group, lane i carrying part i; every member stands for
    itself.

    Raises CollectiveError when an order is no permutation of the others.
    """
    if len({tuple(sorted(order)) for order in orders}) != 1:
        raise CollectiveError("rings of one collective require the same ranks, got different sets")
    order = np.array(orders, dtype=np.int64)
    return Lanes(order, order[:, :, None], np.arange(len(order)), len(order))


def phase(
    name: str,
    lanes: Lanes,
    steps: Sequence[tuple[IntArray, IntArray, IntArray]],
    *,
    reduce: bool,
    charge: Charge = Charge.MOVE,
) -> Phase:
    """A phase from steps of member indices (source, target, owner)."""
    placed = [lanes.moves(*step) for step in steps]
    sizes = [len(source) for source, _, _ in placed]
    empty = np.zeros(0, dtype=np.int64)
    columns = [np.concatenate([p[i] for p in placed] or [empty]) for i in range(3)]
    starts = np.cumsum([0, *sizes], dtype=np.int64)
    return Phase(name, columns[0], columns[1], columns[2], starts, reduce, charge)
