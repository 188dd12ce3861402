"""Covering arrays: few rows of settings in which every two values of two settings meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence

Row = dict[str, Hashable]
Pair = frozenset[tuple[str, Hashable]]
CANDIDATES = 40


def pairs_of(row: Mapping[str, Hashable]) -> set[Pair]:
    """Every two settings of a row with their values."""
    return {frozenset(two) for two in itertools.combinations(row.items(), 2)}


def covering(
    settings: Mapping[str, Sequence[Hashable]],
    may: Callable[[Row], bool] = lambda row: True,
    seed: int = 0,
) -> list[Row]:
    """Rows in which every pair of values stands that some row which `may` be has. Greedy: of some
    drawn rows around a missing pair, the one with the most missing pairs (Cohen et al., "The AETG
    System", IEEE TSE 23(7), 1997).
    """
    rng = random.Random(seed)
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(settings, 2)
        for x, y in itertools.product(settings[a], settings[b])
    }
    rows = []
    while missing:
        wanted = dict(min(missing, key=lambda pair: sorted(map(repr, pair))))
        drawn = [
            {name: wanted.get(name, rng.choice(values)) for name, values in settings.items()}
            for _ in range(CANDIDATES)
        ]
        legal = [row for row in drawn if may(row)]
        if not legal:
            missing.discard(frozenset(wanted.items()))
            continue
        best = max(legal, key=lambda row: len(pairs_of(row) & missing))
        rows.append(best)
        missing -= pairs_of(best)
    return rows
