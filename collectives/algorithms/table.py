"""The algorithms, one row each; schedules, loads, times and the choice read this table.

From the general to the special: inside of an instance the last row that may run does. Across
instances and over whole groups all that may are timed, and the first of the fastest runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.collectives.algorithms.algorithm import Algorithm
from shardwright.collectives.algorithms.kangaring import KANGARING
from shardwright.collectives.algorithms.mesh import GROUPED_MESH, MESH, PAIRWISE, SINGLE_STEP_MESH
from shardwright.collectives.algorithms.recursive import RDH, RECURSIVE
from shardwright.collectives.algorithms.ring import FLAT_RING, RING


def by_name(rows: Iterable[Algorithm]) -> dict[str, Algorithm]:
    """The rows by name. Raises ValueError for a name that is taken."""
    found: dict[str, Algorithm] = {}
    for row in rows:
        if row.name in found:
            raise ValueError(f"two algorithms are called {row.name}")
        found[row.name] = row
    return found


ALGORITHMS = by_name(
    (
        RING,
        FLAT_RING,
        KANGARING,
        RECURSIVE,
        RDH,
        MESH,
        GROUPED_MESH,
        SINGLE_STEP_MESH,
        PAIRWISE,
    )
)
