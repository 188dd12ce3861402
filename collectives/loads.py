"""What a collective loads, in chunks: hops on the longest chain, payload of ranks, links and EFA
devices per phase.

`schedule_loads` counts move by move; `closed_loads` derives the same figures from the recipe
without building moves, for thousands of ranks. Both are independent of the size, so `cost.py` turns
one count into the time of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collectives.costs import CollectiveCosts
from collectives.layout import Layout
from collectives.ops import CollectiveKind
from collectives.recipe import Choice, Recipe
from collectives.schedule import GATHERED, Phase, Schedule
from collectives.topology import IntArray, Topology

RankLoad = tuple[int, int, int]  # chunks received to copy, received to reduce, sent
RateLoad = tuple[int, int]  # bytes per second, chunks on the busiest link of that rate


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """One phase: distinct rank loads that no other one exceeds, busiest link and EFA device per
    rate."""

    ranks: tuple[RankLoad, ...]
    links: tuple[RateLoad, ...]
    efa: tuple[RateLoad, ...]


@dataclass(frozen=True, slots=True)
class Loads:
    """A chunk is ceil(elements / `chunks_per_buffer`) elements; `latency_ps` is the longest chain
    of hops."""

    chunks_per_buffer: int
    latency_ps: int
    phases: tuple[PhaseLoad, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """A phase in closed form: edges between global ranks with `moves` chunks each, what every rank
    receives, the longest chain of hops, and that of the phase run twice in a row.
    """

    source: IntArray
    target: IntArray
    moves: int
    received: int
    latency_ps: int
    twice_ps: int


def schedule_loads(choice: Choice, costs: CollectiveCosts) -> Loads:
    """Count the schedules of all groups move by move. Groups run in step with each other."""
    layout = choice.layout
    schedules = [choice.schedule(g) for g in range(len(layout.ranks))]
    first = schedules[0]
    phases = []
    ready = np.zeros((layout.topology.num_ranks, first.parts), dtype=np.int64)
    for number in range(len(first.phases)):
        parts = [s.phases[number] for s in schedules]
        phases.append(_count(layout, parts))
        for table, phase, schedule in zip(layout.ranks, parts, schedules, strict=True):
            _advance(ready, table, phase, schedule, layout.topology, costs)
    return Loads(_chunks_per_buffer(choice.recipe()), int(ready.max()), tuple(phases))


def _advance(
    ready: IntArray,
    table: IntArray,
    phase: Phase,
    schedule: Schedule,
    topology: Topology,
    costs: CollectiveCosts,
) -> None:
    """Hop times through a phase: a channel of a rank moves on when what it waits for has
    arrived."""
    source, target = table[phase.source], table[phase.target]
    hop = hop_ps(topology, source, target, costs)
    part = phase.chunk % schedule.parts if schedule.kind in GATHERED else phase.chunk * 0
    for a, b in zip(phase.starts[:-1], phase.starts[1:], strict=True):
        arrival = ready[source[a:b], part[a:b]] + hop[a:b]
        np.maximum.at(ready, (target[a:b], part[a:b]), arrival)


def _count(layout: Layout, phases: Sequence[Phase]) -> PhaseLoad:
    """Chunks per rank, link and device of the same phase of all groups."""
    pairs = list(zip(layout.ranks, phases, strict=True))
    source = np.concatenate([table[p.source] for table, p in pairs])
    target = np.concatenate([table[p.target] for table, p in pairs])
    size = layout.topology.num_ranks
    received = np.bincount(target, minlength=size)
    zero = np.zeros_like(received)
    copied, reduced = (zero, received) if phases[0].reduce else (received, zero)
    table = np.stack([copied, reduced, np.bincount(source, minlength=size)], axis=1)
    links, efa = _link_loads(layout.topology, [(source, target, 1)])
    return PhaseLoad(_largest(table), links, efa)


def _largest(table: IntArray) -> tuple[RankLoad, ...]:
    """Distinct rows that no other row exceeds in every column."""
    rows = np.unique(table, axis=0)
    kept = [r for r in rows if not ((rows >= r).all(axis=1) & (rows > r).any(axis=1)).any()]
    return tuple((int(c), int(r), int(s)) for c, r, s in kept)


def closed_loads(choice: Choice, costs: CollectiveCosts) -> Loads:
    """The loads of `schedule_loads` without moves; equal to them where links are uniform.

    Edges are counted on the first instance only: all instances of a group carry the same.
    """
    kind = choice.kind
    phases: list[PhaseLoad] = []
    lanes = [_gather_lanes(choice, g, costs) for g in choice.layout.representatives]
    for same in zip(*lanes, strict=True):
        edges = [(lane.source, lane.target, lane.moves) for lane in same]
        links, efa = _link_loads(choice.layout.topology, edges)
        count = same[0].received
        if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
            phases.insert(0, PhaseLoad(((0, count, count),), links, efa))
        if kind is not CollectiveKind.REDUCE_SCATTER:
            phases.append(PhaseLoad(((count, 0, count),), links, efa))
    chains = [
        sum(x.twice_ps if kind is CollectiveKind.ALL_REDUCE else x.latency_ps for x in lane)
        for lane in lanes
    ]
    return Loads(_chunks_per_buffer(choice.recipe()), max(chains), tuple(phases))


def _chunks_per_buffer(recipe: Recipe) -> int:
    if recipe.kind is CollectiveKind.COLLECTIVE_PERMUTE:
        return 1
    return recipe.size * recipe.parts


def _gather_lanes(choice: Choice, group: int, costs: CollectiveCosts) -> list[_Lane]:
    """The phases of the gather half of a group; the scatter half has the same in reverse."""
    recipe, layout = choice.recipe(group), choice.layout
    if recipe.algorithm == "pairwise":
        return [_mesh(layout, group, [tuple(range(recipe.size))], 1, costs)]
    if recipe.algorithm == "mesh":
        return [_mesh(layout, group, recipe.rings, 1, costs)]
    if recipe.algorithm != "hierarchical":
        return [_ring(layout, group, recipe.rings, 1, costs)]
    first = recipe.grid[0]
    rings = [[first[i] for i in order] for order in recipe.rings]
    instances = len(recipe.grid)
    if recipe.inside == "mesh":
        inside = _mesh(layout, group, rings[:1], instances, costs)
    else:
        inside = _ring(layout, group, rings, instances, costs)
    return [*_across(recipe, layout, group, costs), inside]


def _across(recipe: Recipe, layout: Layout, group: int, costs: CollectiveCosts) -> list[_Lane]:
    """Lanes over instances, one per local index, every part over the same edges."""
    columns = list(zip(*recipe.grid, strict=True))
    if recipe.across == "ring":
        lane = _ring(layout, group, columns, recipe.parts, costs)
        return [replace(lane, received=lane.received // len(columns))]
    lanes = []
    for level in range((len(recipe.grid) - 1).bit_length()):
        block = 1 << level
        source = layout.ranks[group, [column[0] for column in columns]]
        target = layout.ranks[group, [column[block] for column in columns]]
        hop = int(hop_ps(layout.topology, source, target, costs).max())
        moves = block * recipe.parts
        lanes.append(_Lane(source, target, moves, moves, hop, 2 * hop))
    return lanes


def _ring(
    layout: Layout, group: int, rings: Sequence[Sequence[int]], width: int, costs: CollectiveCosts
) -> _Lane:
    """Every edge of a ring passes (members - 1) * width chunks.

    The longest chain is members - 1 edges in a row, so it leaves out the cheapest one; twice that
    is two rounds less the cheapest two edges that follow each other.
    """
    orders = layout.ranks[group, np.array(rings, dtype=np.int64)]
    source, target = orders.ravel(), np.roll(orders, -1, axis=1).ravel()
    members = orders.shape[1]
    if members == 1:
        return _Lane(source[:0], source[:0], 0, 0, 0, 0)
    hops = hop_ps(layout.topology, source, target, costs).reshape(orders.shape)
    whole, following = hops.sum(axis=1), hops + np.roll(hops, -1, axis=1)
    once = int((whole - hops.min(axis=1)).max())
    twice = int((2 * whole - following.min(axis=1)).max())
    source, target = _of_first_instance(layout, group, source, target)
    moves = (members - 1) * width
    return _Lane(source, target, moves, len(rings) * moves, once, twice)


def _mesh(
    layout: Layout, group: int, rings: Sequence[Sequence[int]], width: int, costs: CollectiveCosts
) -> _Lane:
    """Every ordered pair exchanges `width` chunks in one hop."""
    order = layout.ranks[group, np.array(rings[0], dtype=np.int64)]
    members = len(order)
    starts, _ = _of_first_instance(layout, group, order, order)
    source, target = np.repeat(starts, members), np.tile(order, len(starts))
    apart = source != target
    source, target = source[apart], target[apart]
    hop = int(hop_ps(layout.topology, source, target, costs).max(initial=0))
    return _Lane(source, target, width, (members - 1) * width, hop, 2 * hop)


def _of_first_instance(
    layout: Layout, group: int, source: IntArray, target: IntArray
) -> tuple[IntArray, IntArray]:
    """The edges that start on the first instance of a regular group; all edges of an irregular
    one."""
    if layout.grid is None:
        return source, target
    instance = layout.topology.instance_of(source)
    first = layout.ranks[group, layout.grid[group, 0, 0]] // layout.topology.ranks_per_instance
    return source[instance == first], target[instance == first]


def hop_ps(
    topology: Topology, source: IntArray, target: IntArray, costs: CollectiveCosts
) -> IntArray:
    """Latency of each move: the hop of the profile and the wire time of its links."""
    away = topology.instance_of(source) != topology.instance_of(target)
    base: IntArray = np.where(away, costs.inter_hop_ps, costs.intra_hop_ps)
    if not topology.latency_ps.any():
        return base
    links = topology.route(source, target)
    wire = np.where(links >= 0, topology.latency_ps[links % topology.num_links], 0)
    total: IntArray = base + wire.sum(axis=1)
    return total


def _link_loads(
    topology: Topology, edges: Sequence[tuple[IntArray, IntArray, int]]
) -> tuple[tuple[RateLoad, ...], tuple[RateLoad, ...]]:
    """Chunks on the busiest link per rate, for NeuronLink and for EFA. Edges are (sources, targets,
    chunks each)."""
    loads = np.zeros(topology.num_instances * topology.num_links, dtype=np.int64)
    for source, target, moves in edges:
        links = topology.route(source, target)
        loads += moves * np.bincount(links[links >= 0], minlength=len(loads))
    used = np.flatnonzero(loads)
    local = used % topology.num_links
    found: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for rate in np.unique(topology.bytes_per_s[local]).tolist():
        for efa in (False, True):
            here = (topology.bytes_per_s[local] == rate) & (topology.is_efa[local] == efa)
            if here.any():
                found[efa][rate] = int(loads[used[here]].max())
    return tuple(found[0].items()), tuple(found[1].items())
