"""What a collective loads, in chunks: hops on the longest chain, payload of ranks, links and EFA
devices per phase.

`schedule_loads` counts move by move; `closed_loads` derives the same figures from the recipe
without building moves, for thousands of ranks. Both are independent of the size, so `cost.py` turns
one count into the time of any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.layout import Layout
from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.recipe import Choice, Recipe
from shardwright.collectives.schedule import GATHERED, Charge, Phase, Schedule
from shardwright.collectives.topology import IntArray, Topology

# Chunks received to copy, received to reduce, sent, and touched once as one operand or target more.
RankLoad = tuple[int, int, int, int]
RateLoad = tuple[int, int]  # bytes per second, chunks on the busiest link of that rate
WireLoad = tuple[int, int]  # link or device of an instance, chunks on it where it is busiest


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """One phase: distinct rank loads that no other one exceeds, busiest link and EFA device per
    rate, and all of them one by one."""

    ranks: tuple[RankLoad, ...]
    links: tuple[RateLoad, ...]
    efa: tuple[RateLoad, ...]
    wires: tuple[WireLoad, ...]


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
    receives and what it touches besides (gathering, scattering), the longest chain of hops, and
    that of the phase run twice in a row.
    """

    source: IntArray
    target: IntArray
    moves: int
    received: int
    latency_ps: int
    twice_ps: int
    extra: tuple[int, int] = (0, 0)


def schedule_loads(choice: Choice, costs: CollectiveCosts) -> Loads:
    """Count the schedules of all groups move by move. Groups run in step with each other."""
    layout = choice.layout
    schedules = [choice.schedule(g) for g in range(len(layout.ranks))]
    first = schedules[0]
    phases = [
        _count(layout, [[s.phases[n] for s in schedules] for n in numbers])
        for numbers in _transfers(first.phases)
    ]
    ready = np.zeros((layout.topology.num_ranks, first.parts), dtype=np.int64)
    for number in range(len(first.phases)):
        for table, schedule in zip(layout.ranks, schedules, strict=True):
            _advance(ready, table, schedule.phases[number], schedule, layout.topology, costs)
    return Loads(_chunks_per_buffer(choice.recipe()), int(ready.max()), tuple(phases))


def _transfers(phases: Sequence[Phase]) -> list[list[int]]:
    """The phases that are one stretch of transfers: operands read before, duplicates written
    after.
    """
    found: list[list[int]] = []
    before: list[int] = []
    for number, phase in enumerate(phases):
        if phase.charge is Charge.WRITE:
            found[-1].append(number)
        elif phase.charge is Charge.MOVE:
            found.append([*before, number])
            before = []
        else:
            before.append(number)
    return found


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
    if phase.charge in (Charge.READ, Charge.NOTHING):
        hop = hop * 0
    part = phase.chunk % schedule.parts if schedule.kind in GATHERED else phase.chunk * 0
    for a, b in zip(phase.starts[:-1], phase.starts[1:], strict=True):
        arrival = ready[source[a:b], part[a:b]] + hop[a:b]
        np.maximum.at(ready, (target[a:b], part[a:b]), arrival)


def _count(layout: Layout, stretch: Sequence[Sequence[Phase]]) -> PhaseLoad:
    """Chunks per rank, link and device of one stretch of transfers, of all groups: phases that
    belong together, each once per group.
    """
    table = np.zeros((layout.topology.num_ranks, 4), dtype=np.int64)
    edges = []
    for phases in stretch:
        pairs = list(zip(layout.ranks, phases, strict=True))
        source = np.concatenate([ranks[p.source] for ranks, p in pairs])
        target = np.concatenate([ranks[p.target] for ranks, p in pairs])
        _charge(table, phases[0], source, target)
        edges.append((source, target, 1))
    most = _crossed(layout.topology, edges).max(axis=0)
    return PhaseLoad(_largest(table), *_wire_loads(layout.topology, most))


def _charge(table: IntArray, phase: Phase, source: IntArray, target: IntArray) -> None:
    """Add a phase to the loads of ranks [ranks, 4]; one touch is its primary's to make."""
    size = len(table)
    if phase.charge is Charge.MOVE:
        table[:, 1 if phase.reduce else 0] += np.bincount(target, minlength=size)
        table[:, 2] += np.bincount(source, minlength=size)
    elif phase.charge is Charge.READ:
        table[:, 3] += np.bincount(target, minlength=size)
    elif phase.charge is Charge.WRITE:
        table[:, 3] += np.bincount(source, minlength=size)


def _largest(table: IntArray) -> tuple[RankLoad, ...]:
    """Distinct rows that no other row exceeds in every column."""
    rows = np.unique(table, axis=0)
    kept = [r for r in rows if not ((rows >= r).all(axis=1) & (rows > r).any(axis=1)).any()]
    return tuple((int(c), int(r), int(s), int(e)) for c, r, s, e in kept)


def closed_loads(choice: Choice, costs: CollectiveCosts) -> Loads:
    """The loads of `schedule_loads` without moves; equal to them where links are uniform.

    Edges are counted on the first instance only: all instances of a group carry the same.
    """
    kind = choice.kind
    phases: list[PhaseLoad] = []
    lanes = [_gather_lanes(choice, g, costs) for g in choice.layout.representatives]
    for same in zip(*lanes, strict=True):
        wires = _wire_loads(choice.layout.topology, _crossed_by_lanes(choice.layout, same))
        count, extra = same[0].received, same[0].extra
        if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
            phases.insert(0, PhaseLoad(((0, count, count, extra[1]),), *wires))
        if kind is not CollectiveKind.REDUCE_SCATTER and not _is_single(choice):
            phases.append(PhaseLoad(((count, 0, count, extra[0]),), *wires))
    twice = kind is CollectiveKind.ALL_REDUCE and not _is_single(choice)
    chains = [sum(x.twice_ps if twice else x.latency_ps for x in lane) for lane in lanes]
    return Loads(_chunks_per_buffer(choice.recipe()), max(chains), tuple(phases))


def _is_single(choice: Choice) -> bool:
    """An all_reduce that is no reduce_scatter and all_gather."""
    return choice.algorithm == "single_step_mesh"


def _chunks_per_buffer(recipe: Recipe) -> int:
    if recipe.kind is CollectiveKind.COLLECTIVE_PERMUTE:
        return 1
    return recipe.size * recipe.parts


def _gather_lanes(choice: Choice, group: int, costs: CollectiveCosts) -> list[_Lane]:
    """The phases of the gather half of a group; the scatter half has the same in reverse."""
    recipe, layout = choice.recipe(group), choice.layout
    if recipe.patterns:
        sides = [side for side, size in enumerate(recipe.sides) if size > 1]
        found = [_side_lanes(recipe, layout, group, side, costs) for side in sides]
        return [lane for lanes in found for lane in lanes]
    if recipe.rings:
        return [_ring(layout, group, np.array(recipe.rings), 1, costs)]
    everyone = np.arange(recipe.size)
    width = recipe.size if _is_single(choice) else 1
    return [_mesh(layout, group, everyone[None], width, costs)]


def _side_lanes(
    recipe: Recipe, layout: Layout, group: int, side: int, costs: CollectiveCosts
) -> list[_Lane]:
    """The pattern along one side of the grid, on the first instance."""
    grid, size = recipe.positions(), recipe.sides[side]
    width = math.prod(recipe.sides[:side])
    if side == 0:
        orders = grid.reshape(size, -1).T
    else:
        orders = grid[0].reshape(width // recipe.sides[0], size, -1)
        orders = orders.transpose(0, 2, 1).reshape(-1, size)
    pattern = recipe.patterns[side]
    if pattern == "recursive":
        return _recursive(layout, group, orders, width * recipe.parts, costs)
    if pattern == "mesh":
        return [_mesh(layout, group, orders, width * recipe.parts, costs)]
    if side < len(recipe.sides) - 1:
        return [_ring(layout, group, orders, width, costs, recipe.parts)]
    rings = orders[:, np.array(recipe.rings)].reshape(-1, size)
    if pattern == "kangaring":
        return [_kangaring(layout, group, rings, width, costs)]
    return [_ring(layout, group, rings, width, costs)]


def _recursive(
    layout: Layout, group: int, orders: IntArray, width: int, costs: CollectiveCosts
) -> list[_Lane]:
    """One lane per step; partners swap the blocks they have so far, `width` chunks per member."""
    lanes = []
    ranks = layout.ranks[group][orders]
    places = np.arange(orders.shape[1])
    for level in range((orders.shape[1] - 1).bit_length()):
        block = 1 << level
        source, target = ranks.ravel(), ranks[:, places ^ block].ravel()
        hop = int(hop_ps(layout.topology, source, target, costs).max())
        source, target = _of_first_instance(layout, group, source, target)
        moves = block * width
        lanes.append(_Lane(source, target, moves, moves, hop, 2 * hop))
    return lanes


def _kangaring(
    layout: Layout, group: int, rings: IntArray, width: int, costs: CollectiveCosts
) -> _Lane:
    """A ring of every second member with twice the chunks; every rank is a primary in half of the
    rings, and touches what its secondary reads and contributes once more.
    """
    lane = _ring(layout, group, rings[:, ::2], 2 * width, costs)
    members, roles = rings.shape[1], len(rings) // 2
    duplicates = roles * (members - 1) * width
    contributed = roles * (members + 1) * width
    hop = int(hop_ps(layout.topology, lane.source[:1], lane.source[:1], costs)[0])
    return replace(
        lane,
        received=lane.received // 2,
        latency_ps=lane.latency_ps + hop,
        twice_ps=lane.twice_ps + 2 * hop,
        extra=(duplicates, contributed),
    )


def _ring(
    layout: Layout,
    group: int,
    orders: IntArray,
    width: int,
    costs: CollectiveCosts,
    parts: int = 0,
) -> _Lane:
    """Every edge of a ring passes (members - 1) * width chunks. `orders` are rings of positions:
    of different parts of the chunks over the same members, or, each for all `parts`, over different
    ones.

    The longest chain is members - 1 edges in a row, so it leaves out the cheapest one; twice that
    is two rounds less the cheapest two edges that follow each other.
    """
    ranks = layout.ranks[group][orders]
    source, target = ranks.ravel(), np.roll(ranks, -1, axis=1).ravel()
    members = ranks.shape[1]
    hops = hop_ps(layout.topology, source, target, costs).reshape(ranks.shape)
    whole, following = hops.sum(axis=1), hops + np.roll(hops, -1, axis=1)
    once = int((whole - hops.min(axis=1)).max())
    twice = int((2 * whole - following.min(axis=1)).max())
    source, target = _of_first_instance(layout, group, source, target)
    moves = (members - 1) * width * (parts or 1)
    return _Lane(source, target, moves, (parts and moves) or len(orders) * moves, once, twice)


def _mesh(
    layout: Layout, group: int, orders: IntArray, width: int, costs: CollectiveCosts
) -> _Lane:
    """Every ordered pair of members of a lane exchanges `width` chunks in one hop."""
    ranks = layout.ranks[group][orders]
    members = ranks.shape[1]
    source, target = np.repeat(ranks, members, axis=1).ravel(), np.tile(ranks, members).ravel()
    apart = source != target
    source, target = _of_first_instance(layout, group, source[apart], target[apart])
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


def _crossed(topology: Topology, edges: Sequence[tuple[IntArray, IntArray, int]]) -> IntArray:
    """Chunks on every link and device [instances, links]; edges are (sources, targets, chunks
    each).
    """
    loads = np.zeros(topology.num_instances * topology.num_links, dtype=np.int64)
    for source, target, moves in edges:
        links = topology.route(source, target)
        loads += moves * np.bincount(links[links >= 0], minlength=len(loads))
    return loads.reshape(topology.num_instances, topology.num_links)


def _crossed_by_lanes(layout: Layout, lanes: Sequence[_Lane]) -> IntArray:
    """Chunks on every link and device where it is busiest [links], from the lanes of the
    representatives.

    Lanes of a regular group start on its first instance, which sends over each device what every
    instance sends and, over all targets, what every instance receives.
    """
    by_set: dict[int, list[tuple[IntArray, IntArray, int]]] = {}
    for group, lane in zip(layout.representatives, lanes, strict=True):
        first = -1 if layout.grid is None else int(layout.ranks[group, layout.grid[group, 0, 0]])
        key = first if first < 0 else first // layout.topology.ranks_per_instance
        by_set.setdefault(key, []).append((lane.source, lane.target, lane.moves))
    most = np.zeros(layout.topology.num_links, dtype=np.int64)
    for key, edges in by_set.items():
        crossed = _crossed(layout.topology, edges)
        most = np.maximum(most, crossed.max(axis=0) if key < 0 else crossed.sum(axis=0))
    return most


def _wire_loads(
    topology: Topology, most: IntArray
) -> tuple[tuple[RateLoad, ...], tuple[RateLoad, ...], tuple[WireLoad, ...]]:
    """The busiest link per rate, for NeuronLink and for EFA, and all of them."""
    used = np.flatnonzero(most)
    found: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for rate in np.unique(topology.bytes_per_s[used]).tolist():
        for efa in (False, True):
            here = (topology.bytes_per_s[used] == rate) & (topology.is_efa[used] == efa)
            if here.any():
                found[efa][rate] = int(most[used[here]].max())
    wires = tuple(zip(used.tolist(), most[used].tolist(), strict=True))
    return tuple(found[0].items()), tuple(found[1].items()), wires
