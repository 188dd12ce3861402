"""What defines the schedule of a group, and how to build it.

A `Choice` names the algorithm of one collective over all its groups; the `Recipe` of a group adds
orders of positions, found from where its ranks sit. Schedules are built only when asked, because
time at thousands of ranks needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shardwright.collectives.algorithms.pairwise import all_to_all, collective_permute
from shardwright.collectives.algorithms.table import ALGORITHMS
from shardwright.collectives.algorithms.tiers import tiers
from shardwright.collectives.groups.layout import Layout, Orders, chip_order, inside_rings, on_chip
from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.schedule import Schedule
from shardwright.collectives.topology import IntArray

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What defines the schedule of one group; equal recipes share a schedule.

    Positions in `grid` (row-major over `sides`; as listed when empty), the algorithms `patterns`
    along its sides, orders of the last side in `rings`, one part of every chunk each. `pairs` are
    those of a permute.
    """

    kind: CollectiveKind
    algorithm: str
    sides: tuple[int, ...]
    patterns: tuple[str, ...] = ()
    rings: Orders = ()
    grid: tuple[int, ...] = ()
    pairs: Pairs = ()

    @property
    def parts(self) -> int:
        """Pieces every chunk is cut into."""
        return len(self.rings) or 1

    @property
    def chunks_per_buffer(self) -> int:
        """Chunks in the larger of source and target of a rank."""
        permutes = self.kind is CollectiveKind.COLLECTIVE_PERMUTE
        return 1 if permutes else math.prod(self.sides) * self.parts

    def positions(self) -> IntArray:
        """The grid as an array."""
        flat = np.array(self.grid or range(math.prod(self.sides)), dtype=np.int64)
        return flat.reshape(self.sides)

    def orders(self, side: int) -> tuple[IntArray, int]:
        """Orders of positions [lanes, members] along `side`; of an inner one, those that start on
        the first place of the outermost. And the chunks of a block that its members send."""
        grid, size = self.positions()[: 1 if side else None], self.sides[side]
        found, outer = np.moveaxis(grid, side, -1).reshape(-1, size), math.prod(self.sides[:side])
        if not self.rings or side < len(self.sides) - 1:
            return found, outer * self.parts
        return found[:, np.array(self.rings)].reshape(-1, size), outer


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm of one collective over all its groups, and the reason in words."""

    kind: CollectiveKind
    layout: Layout
    algorithm: str
    why: str = field(compare=False)
    inside: str = ""
    across: str = ""
    pairs: Pairs = ()

    def recipe(self, group: int = 0) -> Recipe:
        """The recipe of one group."""
        return _recipe(self, group)

    def schedule(self, group: int = 0) -> Schedule:
        """The schedule of one group."""
        return build(self.recipe(group))


@lru_cache(maxsize=4096)
def _recipe(choice: Choice, group: int) -> Recipe:
    """The recipe of `group`: orders from the chips its ranks sit on."""
    kind, layout, algorithm = choice.kind, choice.layout, choice.algorithm
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        return Recipe(kind, algorithm, (layout.group_size,), pairs=choice.pairs)
    row = ALGORITHMS[choice.inside or algorithm]
    along = tuple(pattern.name for pattern in row.along)
    if row.orders is not None or layout.grid is None:
        orders = (row.orders or _in_rank_order)(layout, group)
        return Recipe(kind, algorithm, (layout.group_size,), along, orders)
    grid, chips = layout.grid[group], layout.local_chips(group)
    if len(along) == 2:
        order = chip_order(layout.topology, chips)
        grid = grid[:, np.array([on_chip(chips, chip) for chip in order], dtype=np.int64)]
    rings = inside_rings(layout.topology, chips) if row.along[-1].cycles else ()
    flat = tuple(grid.ravel().tolist())
    return Recipe(kind, algorithm, grid.shape, (choice.across or "ring", *along), rings, flat)


def _in_rank_order(layout: Layout, group: int) -> Orders:
    return (tuple(np.argsort(layout.ranks[group], kind="stable").tolist()),)


@lru_cache(maxsize=512)
def build(recipe: Recipe) -> Schedule:
    """The schedule of a recipe; equal recipes give the same object."""
    match recipe.kind:
        case CollectiveKind.ALL_TO_ALL:
            return all_to_all(math.prod(recipe.sides))
        case CollectiveKind.COLLECTIVE_PERMUTE:
            return collective_permute(math.prod(recipe.sides), recipe.pairs)
        case _:
            grid = recipe.positions()
            return tiers(recipe.kind, grid, recipe.patterns, recipe.rings, recipe.algorithm)
