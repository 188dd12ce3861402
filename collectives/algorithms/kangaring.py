"""KangaRing: a ring over every second rank; each carries its chip neighbour's chunks as well.

Members come in pairs of one chip. The first of a pair (the primary) is on the ring and moves and
reduces for both: what it receives it writes to both at the cost of one read, what the secondary
contributes it reads where it lies. Rings alternate who is the primary.
Source: documented: intra-node collectives page (all ranks of a chip in one group; 3 instead of 4
touches of memory per chunk and pair when gathering, 4 instead of 6 when reducing).
"""

from __future__ import annotations

import numpy as np

from shardwright.collectives.algorithms import ring
from shardwright.collectives.algorithms.lanes import Lanes, phase
from shardwright.collectives.schedule import Charge, Phase
from shardwright.collectives.topology import IntArray


def gather_phases(lanes: Lanes, name: str) -> list[Phase]:
    """The ring of primaries from their own and their secondaries' chunks; duplicates to these."""
    primary, secondary = _pairs(lanes)
    pair = (secondary, primary, secondary)
    collect = phase(f"{name}: collect", lanes, [pair], reduce=False, charge=Charge.NOTHING)
    over = ring.gather_phase(primaries(lanes), name)
    members = np.arange(lanes.members)
    to, owner = np.repeat(secondary, lanes.members), np.tile(members, len(secondary))
    apart = to != owner
    copies = (to[apart] - 1, to[apart], owner[apart])
    duplicate = phase(f"{name}: duplicate", lanes, [copies], reduce=False, charge=Charge.WRITE)
    return [collect, over, duplicate]


def scatter_phases(lanes: Lanes, name: str) -> list[Phase]:
    """The ring of primaries over the sums of both ranks; each secondary is handed its chunk."""
    primary, secondary = _pairs(lanes)
    members = np.arange(lanes.members)
    source, owner = np.repeat(secondary, lanes.members), np.tile(members, len(secondary))
    parts = (source, source - 1, owner)
    fold = phase(f"{name}: fold", lanes, [parts], reduce=True, charge=Charge.READ)
    over = ring.scatter_phase(primaries(lanes), name)
    given = (primary, secondary, secondary)
    hand = phase(f"{name}: hand over", lanes, [given], reduce=False, charge=Charge.WRITE)
    return [fold, over, hand]


def primaries(lanes: Lanes) -> Lanes:
    """The lanes of the primaries, each standing for its pair."""
    order = lanes.order[:, ::2]
    owners = np.concatenate([lanes.owners[:, ::2], lanes.owners[:, 1::2]], axis=2)
    return Lanes(order, owners, lanes.part, lanes.parts)


def _pairs(lanes: Lanes) -> tuple[IntArray, IntArray]:
    """Member indices of primaries and of their secondaries."""
    primary = np.arange(0, lanes.members, 2)
    return primary, primary + 1
