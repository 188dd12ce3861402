"""Direct exchanges: all_to_all as one mesh step, collective_permute as its pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.collectives.algorithms.mesh import PAIRWISE
from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.schedule import Phase, Schedule


def all_to_all(num_ranks: int) -> Schedule:
    """Every rank sends piece t of its source straight to rank t; nearest successors first."""
    ((_, [(source, target, _)]),) = PAIRWISE.moves(num_ranks, reduces=False)
    starts = np.array([0, len(source)], dtype=np.int64)
    moves = Phase("exchange", source, target, source * num_ranks + target, starts, False)
    return Schedule(CollectiveKind.ALL_TO_ALL, PAIRWISE.name, num_ranks, 1, (moves,))


def collective_permute(num_ranks: int, pairs: Sequence[tuple[int, int]]) -> Schedule:
    """Rank s sends its whole source to rank t for every (s, t) in `pairs`; other ranks receive
    zeros.

    Raises CollectiveError when a rank is outside the group, sends twice or receives twice.
    """
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    inside = ((table >= 0) & (table < num_ranks)).all()
    unique = all(len(np.unique(column)) == len(column) for column in table.T)
    if not (inside and unique):
        raise CollectiveError(
            f"collective_permute requires distinct sources and targets below {num_ranks},"
            f" got {list(pairs)}"
        )
    source, target = table[table[:, 0] != table[:, 1]].T
    starts = np.array([0, len(source)], dtype=np.int64)
    moves = Phase("permute", source, target, source, starts, False)
    pairs_kept = tuple((int(s), int(t)) for s, t in table)
    return Schedule(CollectiveKind.COLLECTIVE_PERMUTE, "direct", num_ranks, 1, (moves,), pairs_kept)
