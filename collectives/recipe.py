"""What defines the schedule of a group, and how to build it.

A `Choice` names the algorithm of one collective over all its groups; the `Recipe` of a group adds
orders of positions, found from where its ranks sit. Schedules are built only when asked, because
time at thousands of ranks needs none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from collectives.algorithms.hierarchical import hierarchical
from collectives.algorithms.mesh import mesh
from collectives.algorithms.pairwise import all_to_all, collective_permute
from collectives.algorithms.ring import ring
from collectives.layout import Layout, Orders, flat_rings, inside_rings
from collectives.ops import CollectiveKind
from collectives.schedule import Schedule

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What defines the schedule of one group; equal recipes share a schedule.

    algorithm: `mesh`, `ring`, `flat_ring` (orders of positions in `rings`), `hierarchical` (orders
    of local indices in `rings`, positions in `grid[instance][local index]`), `pairwise`, `direct`.
    """

    kind: CollectiveKind
    algorithm: str
    size: int
    rings: Orders = ()
    grid: Orders = ()
    inside: str = ""
    across: str = ""
    pairs: Pairs = ()

    @property
    def parts(self) -> int:
        """Pieces every chunk is cut into."""
        single = self.inside == "mesh" or self.algorithm in ("pairwise", "direct")
        return 1 if single else len(self.rings)


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
    if algorithm in ("pairwise", "direct"):
        return Recipe(kind, algorithm, size, grid=_grid(layout, group), pairs=pairs)
    if layout.grid is None:
        order = tuple(int(i) for i in np.argsort(layout.ranks[group], kind="stable"))
        return Recipe(kind, algorithm, size, (order,))
    grid, chips = _grid(layout, group), layout.local_chips(group)
    if algorithm == "hierarchical":
        rings = inside_rings(layout.topology, chips)
        return Recipe(kind, algorithm, size, rings, grid, inside, across)
    if algorithm == "mesh":
        return Recipe(kind, algorithm, size, (tuple(grid[0]),), grid)
    orders = (flat_rings if algorithm == "flat_ring" else inside_rings)(layout.topology, chips)
    rings = tuple(tuple(row[i] for row in grid for i in order) for order in orders)
    return Recipe(kind, algorithm, size, rings, grid)


def _grid(layout: Layout, group: int) -> Orders:
    if layout.grid is None:
        return ()
    return tuple(tuple(row) for row in layout.grid[group].tolist())


@lru_cache(maxsize=512)
def build(recipe: Recipe) -> Schedule:
    """The schedule of a recipe; equal recipes give the same object."""
    match recipe.algorithm:
        case "pairwise":
            return all_to_all(recipe.size)
        case "direct":
            return collective_permute(recipe.size, recipe.pairs)
        case "mesh":
            return mesh(recipe.kind, recipe.rings[0])
        case "hierarchical":
            return hierarchical(
                recipe.kind,
                recipe.grid,
                recipe.rings,
                inside=recipe.inside,
                across=recipe.across,
            )
        case _:
            return ring(recipe.kind, recipe.rings, recipe.algorithm)
