"""Mesh algorithms: everyone to everyone in one logical step; few hops, but the links of a torus are
oversubscribed.

An owner adds what comes in the order of the distance to its predecessors.
Source: documented: intra-node collectives page; runtime release notes name a chip-grouped variant
on trn1; all-to-all is one step of the mesh pattern (runtime release notes).
"""

from __future__ import annotations

import numpy as np

from shardwright.collectives.algorithms.algorithm import Algorithm, Asked, Steps
from shardwright.collectives.groups.layout import Layout, Orders
from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.topology import IntArray


def _everyone(members: int) -> tuple[IntArray, IntArray]:
    """All members, and whom they send to: one way per distance, nearest successors first."""
    around = np.arange(2 * members) % members
    return around[:members], np.lib.stride_tricks.sliding_window_view(around, members)[1:members]


def gather(members: int) -> list[Steps]:
    """Everyone sends its own chunk to all others."""
    member, others = _everyone(members)
    return [Steps(member, others, member[:, None])]


def _exchange(members: int) -> list[Steps]:
    """Everyone sends its whole buffer to all others, who reduce it.

    Source: documented: intra- and inter-node collectives pages (one hop less than the mesh, N / 2
    times its payload).
    """
    member, others = _everyone(members)
    return [Steps(member, others, np.tile(member, (members, 1)))]


def _inside(asked: Asked) -> str:
    size, most = asked.size_bytes, asked.costs.mesh_max_bytes
    return f"{size} B <= mesh_max_bytes {most}" if size <= most else ""


def _across(asked: Asked) -> bool:
    few = asked.layout.num_instances <= asked.costs.inter_mesh_max_instances
    return few and bool(_inside(asked))


def _grouped(asked: Asked) -> str:
    if asked.costs.mesh != "grouped" or not _inside(asked):
        return ""
    local = asked.layout.group_size // asked.layout.num_instances
    return _inside(asked) if 1 < asked.layout.ranks_per_chip < local else ""


def _pair(asked: Asked) -> str:
    two = asked.layout.group_size == 2 and asked.layout.num_instances == 1
    fits = two and asked.kind is CollectiveKind.ALL_REDUCE and _inside(asked)
    return "two ranks: one step moves no more than two" if fits else ""


def as_listed(layout: Layout, group: int) -> Orders:
    """The positions of a group in group order."""
    return (tuple(range(layout.group_size)),)


MESH = Algorithm(name="mesh", gather=gather, inside=_inside, across=_across)
GROUPED_MESH = Algorithm(name="grouped_mesh", sides=(MESH, MESH), inside=_grouped)
SINGLE_STEP_MESH = Algorithm(
    name="single_step_mesh", scatter=_exchange, orders=as_listed, whole=_pair
)
PAIRWISE = Algorithm(name="pairwise", gather=gather, orders=as_listed)
