"""Choose an algorithm for a collective and say why.

Size, group shape and the thresholds in `CollectiveCosts` say which algorithms may be used; where
two may (several instances, large messages), the one with the shorter predicted time is taken, as a
tuned runtime would.
Source: rules and thresholds from the intra- and inter-node collectives pages (trn2) and release
notes; the choice on trn1 and trn1n is an unknown-default built from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.costs import CollectiveCosts
from collectives.layout import Layout, place
from collectives.ops import CollectiveKind, ReplicaGroups
from collectives.recipe import Choice
from collectives.timing import closed_time
from collectives.topology import Topology


def choose(
    kind: CollectiveKind,
    topology: Topology,
    groups: ReplicaGroups,
    size_bytes: int,
    element_bytes: int,
    costs: CollectiveCosts,
    *,
    pairs: Sequence[tuple[int, int]] = (),
) -> Choice:
    """The algorithm for `size_bytes` (larger of source and target of a rank). `pairs` are
    positions, for permutes.

    Raises CollectiveError for groups that do not fit the topology.
    """
    layout = place(topology, groups)
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        why = "every pair is sent directly"
        return Choice(kind, layout, "direct", why, pairs=tuple((int(s), int(t)) for s, t in pairs))
    if kind is CollectiveKind.ALL_TO_ALL:
        beyond = " (documented inside one instance only)" if layout.num_instances != 1 else ""
        return Choice(kind, layout, "pairwise", f"all_to_all is one mesh step{beyond}")
    if layout.grid is None:
        why = "groups differ in local indices or overlap in instances: ring in rank order"
        return Choice(kind, layout, "ring", why)
    if layout.num_instances == 1:
        name, why = _inside(size_bytes, costs)
        return Choice(kind, layout, name, why)
    near = _hierarchical(kind, layout, size_bytes, costs)
    if layout.num_instances == layout.group_size or size_bytes < costs.flat_ring_min_bytes:
        return near
    return _faster(near, size_bytes, element_bytes, costs)


def _inside(size_bytes: int, costs: CollectiveCosts) -> tuple[str, str]:
    """Algorithm inside one instance."""
    limit = costs.mesh_max_bytes
    if size_bytes <= limit:
        return "mesh", f"one instance, {size_bytes} B <= mesh_max_bytes {limit}"
    return "ring", f"one instance, {size_bytes} B > mesh_max_bytes {limit}"


def _hierarchical(
    kind: CollectiveKind, layout: Layout, size_bytes: int, costs: CollectiveCosts
) -> Choice:
    instances = layout.num_instances
    power = instances & (instances - 1) == 0
    across = "recursive" if power and costs.inter_recursive else "ring"
    inside, _ = _inside(size_bytes, costs)
    local = layout.group_size // instances
    why = f"{instances} instances x {local} ranks: {inside} inside, {across} across"
    return Choice(kind, layout, "hierarchical", why, inside, across)


def _faster(near: Choice, size_bytes: int, element_bytes: int, costs: CollectiveCosts) -> Choice:
    """`near`, or the flat ring over all instances when it is predicted to be faster."""
    flat = Choice(near.kind, near.layout, "flat_ring", "")
    times = [closed_time(c, size_bytes, element_bytes, costs).total_ps for c in (near, flat)]
    near_us, flat_us = (ps // 1_000_000 for ps in times)
    limit = costs.flat_ring_min_bytes
    if times[1] <= times[0]:
        why = f"{size_bytes} B >= flat_ring_min_bytes {limit}: {flat_us} us"
        why += f", hierarchical {near_us} us"
        return Choice(near.kind, near.layout, "flat_ring", why)
    why = f"{near.why}; {near_us} us, flat ring {flat_us} us"
    return Choice(near.kind, near.layout, "hierarchical", why, near.inside, near.across)
