"""What defines the schedule of a group, and how to build it.

A `Choice` names the algorithm of one collective over all its groups; the `Recipe` of a group adds
orders of positions, found from where its ranks sit. Schedules are built only when asked, because
time at thousands of ranks needs none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shardwright.collectives.algorithms.mesh import single_step
from shardwright.collectives.algorithms.pairwise import all_to_all, collective_permute
from shardwright.collectives.algorithms.ring import ring
from shardwright.collectives.algorithms.tiers import RINGS, num_parts, tiers
from shardwright.collectives.layout import Layout, Orders, chip_order, flat_rings, inside_rings
from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.schedule import Schedule
from shardwright.collectives.topology import IntArray

Pairs = tuple[tuple[int, int], ...]


# What runs along the sides of one instance: its chips and the ranks of a chip, or all its ranks.
INSIDE = {
    "mesh": ("mesh",),
    "ring": ("ring",),
    "kangaring": ("kangaring",),
    "grouped_mesh": ("mesh", "mesh"),
    "rdh": ("recursive", "mesh"),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What defines the schedule of one group; equal recipes share a schedule.

    algorithm: one of `INSIDE`, or `hierarchical`: positions in `grid` (row-major over `sides`),
    `patterns` along its sides, `rings` of the last one. `flat_ring`, and `ring` of irregular
    groups: orders of positions in `rings`, no patterns. `single_step_mesh`, `pairwise`, `direct`.
    """

    kind: CollectiveKind
    algorithm: str
    size: int
    rings: Orders = ()
    grid: tuple[int, ...] = ()
    sides: tuple[int, ...] = ()
    patterns: tuple[str, ...] = ()
    pairs: Pairs = ()

    @property
    def parts(self) -> int:
        """Pieces every chunk is cut into."""
        if self.patterns:
            return num_parts(self.patterns, self.rings)
        return len(self.rings) or 1

    def positions(self) -> IntArray:
        """The grid as an array."""
        return np.array(self.grid, dtype=np.int64).reshape(self.sides)


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
        names = (self.algorithm, self.inside, self.across)
        return _recipe(self.kind, self.layout, names, self.pairs, group)

    def schedule(self, group: int = 0) -> Schedule:
        """The schedule of one group."""
        return build(self.recipe(group))


@lru_cache(maxsize=4096)
def _recipe(
    kind: CollectiveKind, layout: Layout, names: tuple[str, str, str], pairs: Pairs, group: int
) -> Recipe:
    """The recipe of `group`: orders from the chips its ranks sit on."""
    algorithm, inside, across = names
    size = layout.group_size
    if algorithm in ("pairwise", "direct", "single_step_mesh"):
        return Recipe(kind, algorithm, size, pairs=pairs)
    if layout.grid is None:
        order = tuple(int(i) for i in np.argsort(layout.ranks[group], kind="stable"))
        return Recipe(kind, algorithm, size, (order,))
    grid, chips = layout.grid[group], layout.local_chips(group)
    if algorithm == "flat_ring":
        orders = flat_rings(layout.topology, chips)
        rings = tuple(tuple(row[i] for row in grid.tolist() for i in order) for order in orders)
        return Recipe(kind, algorithm, size, rings)
    name = inside or algorithm
    patterns = (across or "ring", *INSIDE[name])
    if len(patterns) == 3:
        order = chip_order(layout.topology, chips)
        by_chip = np.array([_on_chip(chips, chip) for chip in order], dtype=np.int64)
        grid = grid[:, by_chip]
    rings = inside_rings(layout.topology, chips) if name in RINGS else ()
    flat = tuple(grid.ravel().tolist())
    return Recipe(kind, algorithm, size, rings, flat, grid.shape, patterns)


def _on_chip(chips: tuple[int, ...], chip: int) -> list[int]:
    return [i for i, c in enumerate(chips) if c == chip]


@lru_cache(maxsize=512)
def build(recipe: Recipe) -> Schedule:
    """The schedule of a recipe; equal recipes give the same object."""
    if recipe.patterns:
        grid = recipe.positions()
        return tiers(recipe.kind, grid, recipe.patterns, recipe.rings, recipe.algorithm)
    match recipe.algorithm:
        case "pairwise":
            return all_to_all(recipe.size)
        case "direct":
            return collective_permute(recipe.size, recipe.pairs)
        case "single_step_mesh":
            return single_step(range(recipe.size))
        case _:
            return ring(recipe.kind, recipe.rings, recipe.algorithm)
