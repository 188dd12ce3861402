"""Recursive halving and doubling: log2 N steps for N a power of two, minimal traffic.

Used across instances, and between the chips of one where these make a hypercube (a mesh runs inside
the chips). Source: documented: inter-node since SDK 2.24 (runtime release notes, inter-node
collectives page); a 2-D torus of 16 chips is a hypercube (intra-node collectives page).
"""

from __future__ import annotations

import numpy as np

from shardwright.collectives.algorithms.algorithm import Algorithm, Asked, Steps
from shardwright.collectives.algorithms.mesh import MESH
from shardwright.collectives.groups.layout import is_hypercube
from shardwright.collectives.ops import CollectiveError


def _gather(members: int) -> list[Steps]:
    """Doubling: partners at distance 1, 2, 4, ... swap the aligned blocks they have so far."""
    if members & (members - 1):
        raise CollectiveError(
            f"recursive algorithms require a power of two of ranks, got {members}; use ring"
        )
    member, found = np.arange(members), []
    for block in (1 << level for level in range(members.bit_length() - 1)):
        own = (member & -block)[:, None] + np.arange(block)
        found.append(Steps(member, (member ^ block)[None], own))
    return found


def across(asked: Asked) -> bool:
    """Whether it runs across instances."""
    instances = asked.layout.num_instances
    return instances & (instances - 1) == 0 and asked.costs.inter_recursive


def _inside(asked: Asked) -> str:
    layout, size = asked.layout, asked.size_bytes
    least, most = asked.costs.mesh_max_bytes, asked.costs.rdh_max_bytes
    if size > most or not 0 < layout.ranks_per_chip < layout.group_size // layout.num_instances:
        return ""
    chips = (layout.local_chips(group) for group in layout.representatives)
    if not all(is_hypercube(layout.topology, c) for c in chips):
        return ""
    return f"mesh_max_bytes {least} < {size} B <= rdh_max_bytes {most}"


RECURSIVE = Algorithm(name="recursive", gather=_gather, across=across)
RDH = Algorithm(name="rdh", sides=(RECURSIVE, MESH), inside=_inside)
