"""Choose an algorithm for a collective, time it, and say why.

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

from shardwright.collectives.algorithms.algorithm import Asked
from shardwright.collectives.algorithms.mesh import PAIRWISE
from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.algorithms.ring import RING
from shardwright.collectives.algorithms.table import ALGORITHMS
from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.groups.layout import place
from shardwright.collectives.ops import CollectiveKind, ReplicaGroups
from shardwright.collectives.timing.times import CollectiveTime, closed_time
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
        return Choice(kind, layout, PAIRWISE.name, f"all_to_all is one mesh step{beyond}")
    if layout.grid is None:
        why = "groups differ in local indices or overlap in instances: ring in rank order"
        return Choice(kind, layout, RING.name, why)
    return _fastest(
        _allowed(Asked(kind, layout, size_bytes, costs)), size_bytes, element_bytes, costs
    )


def collective_time(
    kind: CollectiveKind,
    topology: Topology,
    groups: ReplicaGroups,
    size_bytes: int,
    element_bytes: int,
    costs: CollectiveCosts,
    *,
    pairs: Sequence[tuple[int, int]] = (),
) -> CollectiveTime:
    """Time of `kind` running in all `groups` at once, in closed form.

    `size_bytes` is the larger of source and target of one rank; `pairs` are group positions, for
    collective_permute.
    Raises CollectiveError for sizes below one element and groups that do not fit the topology.
    """
    choice = choose(kind, topology, groups, size_bytes, element_bytes, costs, pairs=pairs)
    return closed_time(choice, size_bytes, element_bytes, costs)


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
    asked = (Asked(kind, layout, size_bytes, replace(costs, **changed)) for changed in settings)
    found = (choice for each in asked for choice in _allowed(each))
    return {full_name(choice): choice for choice in found}


def full_name(choice: Choice) -> str:
    """The name of a choice with its parts."""
    parts = [f"{n} {w}" for n, w in ((choice.inside, "inside"), (choice.across, "across")) if n]
    name = choice.algorithm.replace("_", " ")
    return f"{name} ({', '.join(parts)})" if parts else name


def _allowed(asked: Asked) -> list[Choice]:
    """What size, shape and settings leave to choose from."""
    kind, layout, rows = asked.kind, asked.layout, ALGORITHMS.values()
    name, why = _inside(asked)
    if layout.num_instances == 1:
        found = [Choice(kind, layout, name, why)]
    else:
        local = layout.group_size // layout.num_instances
        shape = f"{layout.num_instances} instances x {local} ranks: {name} inside"
        found = [
            Choice(kind, layout, "hierarchical", f"{shape}, {row.name} across", name, row.name)
            for row in rows
            if row.across(asked)
        ]
    return found + [Choice(kind, layout, r.name, why) for r in rows if (why := r.whole(asked))]


def _inside(asked: Asked) -> tuple[str, str]:
    """Algorithm inside one instance, and why."""
    rows = ((row.name, row.inside(asked)) for row in reversed(ALGORITHMS.values()))
    return next((name, why) for name, why in rows if why)


def _fastest(
    found: Sequence[Choice], size_bytes: int, element_bytes: int, costs: CollectiveCosts
) -> Choice:
    """The choice with the shortest predicted time, the first of equals; its reason names the
    others."""
    if len(found) == 1:
        return found[0]
    times = [closed_time(c, size_bytes, element_bytes, costs).total_ps for c in found]
    best = times.index(min(times))
    taken = found[best]
    others = [
        f"{full_name(replace(c, inside=''))} {ps / 1e6:.1f} us"
        for c, ps in zip(found, times, strict=True)
        if c != taken
    ]
    why = f"{taken.why}; {times[best] / 1e6:.1f} us, {', '.join(others)}"
    return replace(taken, why=why)
