"""Choose an algorithm for a collective and say why.

Size, group shape and the settings in `CollectiveCosts` say which algorithms may be used; where
several may, the one with the shorter predicted time is taken, as a tuned runtime would. Every
choice carries its reason in words, thresholds by name.
Source: rules from the intra- and inter-node collectives pages (trn2) and release notes; thresholds
and their status are in the data files of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.layout import Layout, inside_rings, is_hypercube, place
from shardwright.collectives.ops import CollectiveKind, ReplicaGroups
from shardwright.collectives.recipe import Choice
from shardwright.collectives.timing import closed_time
from shardwright.collectives.topology import Topology


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
    return _fastest(_allowed(kind, layout, size_bytes, costs), size_bytes, element_bytes, costs)


def alternatives(
    kind: CollectiveKind,
    topology: Topology,
    groups: ReplicaGroups,
    size_bytes: int,
    costs: CollectiveCosts,
) -> dict[str, Choice]:
    """Every algorithm that some setting of the thresholds would choose from, by name; none for
    kinds and groups that leave nothing to choose."""
    layout = place(topology, groups)
    chosen = (CollectiveKind.COLLECTIVE_PERMUTE, CollectiveKind.ALL_TO_ALL)
    if kind in chosen or layout.grid is None or layout.group_size == 1:
        return {}
    settings: list[dict[str, Any]] = [
        {},
        {"mesh_max_bytes": size_bytes},
        {"mesh_max_bytes": 0, "rdh_max_bytes": size_bytes},
        {"mesh_max_bytes": 0, "rdh_max_bytes": 0, "kangaring": True},
        {"mesh_max_bytes": 0, "rdh_max_bytes": 0, "kangaring": False},
        {"mesh_max_bytes": 0, "rdh_max_bytes": 0, "inter_recursive": False},
        {"flat_ring_min_bytes": 1},
    ]
    found = (c for s in settings for c in _allowed(kind, layout, size_bytes, replace(costs, **s)))
    return {full_name(choice): choice for choice in found}


def full_name(choice: Choice) -> str:
    """The name of a choice with its parts."""
    parts = [f"{n} {w}" for n, w in ((choice.inside, "inside"), (choice.across, "across")) if n]
    name = choice.algorithm.replace("_", " ")
    return f"{name} ({', '.join(parts)})" if parts else name


def _allowed(
    kind: CollectiveKind, layout: Layout, size: int, costs: CollectiveCosts
) -> list[Choice]:
    """What size, shape and settings leave to choose from."""
    name, why = _inside(layout, size, costs)
    if layout.num_instances > 1:
        found = _hierarchical(kind, layout, size, costs, name)
        flat = costs.flat_ring_min_bytes
        if flat and size >= flat and layout.num_instances < layout.group_size:
            why = f"{size} B >= flat_ring_min_bytes {flat}"
            found.append(Choice(kind, layout, "flat_ring", why))
        return found
    found = [Choice(kind, layout, name, why)]
    if kind is CollectiveKind.ALL_REDUCE and layout.group_size == 2 and "mesh" in name:
        why = "two ranks: one step moves no more than two"
        found.append(Choice(kind, layout, "single_step_mesh", why))
    return found


def _inside(layout: Layout, size: int, costs: CollectiveCosts) -> tuple[str, str]:
    """Algorithm inside one instance, and why."""
    mesh, rdh = costs.mesh_max_bytes, costs.rdh_max_bytes
    chips, per_chip = layout.local_chips(layout.representatives[0]), layout.ranks_per_chip
    if size <= mesh:
        grouped = costs.mesh == "grouped" and 1 < per_chip < len(chips)
        return "grouped_mesh" if grouped else "mesh", f"{size} B <= mesh_max_bytes {mesh}"
    apart = 0 < per_chip < len(chips)
    if size <= rdh and apart and _is_hypercube(layout):
        return "rdh", f"mesh_max_bytes {mesh} < {size} B <= rdh_max_bytes {rdh}"
    over = f"{size} B > mesh_max_bytes {mesh}"
    if costs.kangaring and per_chip == layout.topology.ranks_per_chip and per_chip % 4 == 0:
        return "kangaring", f"{over}, rdh_max_bytes {rdh}; all ranks of a chip take part"
    rings = len(inside_rings(layout.topology, chips))
    lone = "one rank per chip, " if per_chip == 1 else ""
    return "ring", f"{over}; {lone}rings {rings}, chips {len(set(chips))}"


def _is_hypercube(layout: Layout) -> bool:
    return all(is_hypercube(layout.topology, layout.local_chips(g)) for g in layout.representatives)


def _hierarchical(
    kind: CollectiveKind, layout: Layout, size: int, costs: CollectiveCosts, inside: str
) -> list[Choice]:
    """One choice per algorithm that may run across instances."""
    instances = layout.num_instances
    across = ["ring"]
    if instances & (instances - 1) == 0 and costs.inter_recursive:
        across = ["recursive"]
    if size <= costs.mesh_max_bytes and instances <= costs.inter_mesh_max_instances:
        across.append("mesh")
    local = layout.group_size // instances
    return [
        Choice(
            kind,
            layout,
            "hierarchical",
            f"{instances} instances x {local} ranks: {inside} inside, {name} across",
            inside,
            name,
        )
        for name in across
    ]


def _fastest(
    found: Sequence[Choice], size_bytes: int, element_bytes: int, costs: CollectiveCosts
) -> Choice:
    """The choice with the shortest predicted time, the first of equals; its reason names the
    others.
    """
    if len(found) == 1:
        return found[0]
    times = [closed_time(c, size_bytes, element_bytes, costs).total_ps for c in found]
    best = times.index(min(times))
    taken = found[best]
    others = [
        f"{_name(c)} {ps / 1e6:.1f} us" for c, ps in zip(found, times, strict=True) if c != taken
    ]
    why = f"{taken.why}; {times[best] / 1e6:.1f} us, {', '.join(others)}"
    return Choice(taken.kind, taken.layout, taken.algorithm, why, taken.inside, taken.across)


def _name(choice: Choice) -> str:
    name = choice.algorithm.replace("_", " ")
    return f"{name} ({choice.across} across)" if choice.across else name
