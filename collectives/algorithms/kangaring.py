"""KangaRing: a ring over every second rank; each carries its chip neighbour's chunks as well.

Members come in pairs of one chip. The first of a pair (the primary) is on the ring and moves and
reduces for both: what it receives it writes to both at the cost of one read, what the secondary
contributes it reads where it lies. Rings alternate who is the primary.
Source: documented: intra-node collectives page (all ranks of a chip in one group; 3 instead of 4
touches of memory per chunk and pair when gathering, 4 instead of 6 when reducing).
"""

from __future__ import annotations

import numpy as np

from shardwright.collectives.algorithms.algorithm import Algorithm, Asked, Steps
from shardwright.collectives.ops import CollectiveError
from shardwright.collectives.schedule import Charge
from shardwright.collectives.topology import IntArray


def _gather(members: int) -> list[Steps]:
    """The ring of primaries from their own and their secondaries' chunks; duplicates to these."""
    pairs = _pairs(members)
    primary, secondary = pairs.T
    collect = Steps(secondary, primary[None], pairs[:, 1:], charge=Charge.NOTHING, name="collect")
    others = np.tile(np.arange(members), (len(pairs), 1))
    others = others[others != secondary[:, None]].reshape(len(pairs), -1)
    duplicate = Steps(primary, secondary[None], others, charge=Charge.WRITE, name="duplicate")
    return [collect, _ring(primary, pairs), duplicate]


def _scatter(members: int) -> list[Steps]:
    """The ring of primaries over the sums of both ranks; each secondary is handed its chunk."""
    pairs = _pairs(members)
    primary, secondary = pairs.T
    everything = np.tile(np.arange(members), (len(pairs), 1))
    fold = Steps(secondary, primary[None], everything, charge=Charge.READ, name="fold")
    hand = Steps(primary, secondary[None], pairs[:, 1:], charge=Charge.WRITE, name="hand over")
    return [fold, _ring(primary, np.roll(pairs, 1, axis=0)), hand]


def _ring(primary: IntArray, first: IntArray) -> Steps:
    """Once round, beginning with the chunks `first` of each."""
    return Steps(primary, np.roll(primary, -1)[None], first, times=len(primary) - 1)


def _pairs(members: int) -> IntArray:
    """Primary and secondary of each pair."""
    if members % 2:
        raise CollectiveError(f"kangaring requires pairs of ranks of a chip, got {members} ranks")
    return np.arange(members).reshape(-1, 2)


def _inside(asked: Asked) -> str:
    costs, layout = asked.costs, asked.layout
    on_chip = layout.topology.ranks_per_chip
    if not costs.kangaring or on_chip % 4 or layout.ranks_per_chip != on_chip:
        return ""
    over = f"{asked.size_bytes} B > mesh_max_bytes {costs.mesh_max_bytes}"
    return f"{over}, rdh_max_bytes {costs.rdh_max_bytes}; all ranks of a chip take part"


KANGARING = Algorithm(
    name="kangaring", gather=_gather, scatter=_scatter, cycles=True, inside=_inside
)
