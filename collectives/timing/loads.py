"""What a collective loads, in chunks: hops on the longest chain, payload of ranks, links and EFA
devices per phase.

`schedule_loads` counts move by move; `closed_loads` derives the same figures from the steps of the
algorithms without building moves, for thousands of ranks. Both are independent of the size, so
`times.py` turns one count into the time of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardwright.collectives.algorithms.algorithm import Steps
from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.algorithms.table import ALGORITHMS
from shardwright.collectives.algorithms.tiers import runs
from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.schedule import GATHERED, Charge, Phase, Schedule, halves
from shardwright.collectives.topology import IntArray, Topology

# Chunks received to copy, received to reduce, sent, and touched once as one operand or target more.
RankLoad = tuple[int, int, int, int]
RateLoad = tuple[int, int]  # bytes per second, chunks on the busiest link of that rate
WireLoad = tuple[int, int]  # link or device of an instance, chunks on it where it is busiest


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """One phase: distinct rank loads that no other one exceeds, one at least, busiest link and EFA
    device per rate, and all of them one by one."""

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
class _Edges:
    """Chunks that go from rank to rank at one charge, each edge with its hop from one place of the
    chains of hops to another.

    Shapes: [edges], `links` [edges, longest route], -1 where it ends.
    """

    charge: Charge
    source: IntArray
    target: IntArray
    chunks: IntArray
    at: IntArray
    to: IntArray
    links: IntArray
    hop_ps: IntArray


def _routed(
    topology: Topology,
    costs: CollectiveCosts,
    charge: Charge,
    ends: tuple[IntArray, IntArray],
    chunks: IntArray,
    places: tuple[IntArray, IntArray],
    home: IntArray | None = None,
) -> _Edges:
    """Edges with their links, and hops: that of the profile and the wire time of the links. With
    instances `home` [edges] ranks and links are those that stand there for the real ones: what goes
    to another instance is as much as what comes from there."""
    source, target = ends
    links = topology.route(source, target)
    away = topology.instance_of(source) != topology.instance_of(target)
    hop = np.where(away, costs.inter_hop_ps, costs.intra_hop_ps)
    if topology.latency_ps.any():
        wire = np.where(links >= 0, topology.latency_ps[links % topology.num_links], 0)
        hop = hop + wire.sum(axis=1)
    if charge in (Charge.READ, Charge.NOTHING):
        hop = hop * 0
    if home is not None:
        first = home * topology.ranks_per_instance
        source, target = (first + end % topology.ranks_per_instance for end in ends)
        there = home[:, None] * topology.num_links + links % max(1, topology.num_links)
        links = np.where(links >= 0, there, -1)
    return _Edges(charge, source, target, chunks, *places, links, hop)


def schedule_loads(
    choice: Choice, costs: CollectiveCosts, weights: IntArray | None = None
) -> Loads:
    """Count the schedules of all groups move by move. Groups run in step with each other.

    `weights` are of every chunk, one where none are given; a chunk of nothing is still announced.
    """
    topology = choice.layout.topology
    schedules = [choice.schedule(g) for g in range(len(choice.layout.ranks))]
    first = schedules[0].phases
    edges = [_moved(choice, schedules, number, costs, weights) for number in range(len(first))]
    phases = [
        _count(topology, [edges[n] for n in numbers], any(first[n].reduce for n in numbers))
        for numbers in _transfers(first)
    ]
    ready_ps = np.zeros(topology.num_ranks * schedules[0].parts, dtype=np.int64)
    for phase, moved in zip(first, edges, strict=True):
        for a, b in pairwise((phase.starts * len(schedules)).tolist()):
            # A channel of a rank moves on when what it waits for has arrived.
            arrival = ready_ps[moved.at[a:b]] + moved.hop_ps[a:b]
            np.maximum.at(ready_ps, moved.to[a:b], arrival)
    return Loads(choice.recipe().chunks_per_buffer, int(ready_ps.max()), tuple(phases))


def _moved(
    choice: Choice,
    schedules: Sequence[Schedule],
    number: int,
    costs: CollectiveCosts,
    weights: IntArray | None,
) -> _Edges:
    """The moves of phase `number` of all groups, step by step; a channel of a rank is a place."""
    layout, parts = choice.layout, schedules[0].parts
    phases = [schedule.phases[number] for schedule in schedules]
    pairs = list(zip(layout.ranks, phases, strict=True))
    source = np.stack([ranks[phase.source] for ranks, phase in pairs], axis=1).ravel()
    target = np.stack([ranks[phase.target] for ranks, phase in pairs], axis=1).ravel()
    chunk = np.stack([phase.chunk for phase in phases], axis=1).ravel()
    part = chunk % parts if choice.kind in GATHERED else chunk * 0
    places = source * parts + part, target * parts + part
    amounts = np.ones_like(source) if weights is None else weights[chunk]
    return _routed(layout.topology, costs, phases[0].charge, (source, target), amounts, places)


def _transfers(phases: Sequence[Phase | Steps]) -> list[list[int]]:
    """The numbers of those that are one stretch of transfers: operands read before, duplicates
    written after."""
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


def closed_loads(choice: Choice, costs: CollectiveCosts) -> Loads:
    """The loads of `schedule_loads` without moves; equal to them where links are uniform.

    Counted where a regular group starts, on its first instance: a step takes every instance of the
    group to others alike, so that one stands for all. Of an irregular group all ranks count.
    """
    recipe, order = choice.recipe(), list(runs(choice.kind, choice.recipe().sides))
    chain_ps = np.zeros(len(choice.layout.representatives), dtype=np.int64)
    loads: dict[tuple[bool, int], list[PhaseLoad]] = {}
    for side in {side for _, side in order}:
        half = ALGORITHMS[recipe.patterns[side]].steps(recipe.sides[side])
        sequence = [steps for reduces in halves(choice.kind) for steps in half[reduces]]
        lanes = _lanes(choice, side)
        edges = {steps: lanes.edges(steps, costs) for steps in sequence}
        chain_ps += lanes.chain_ps([(steps, edges[steps]) for steps in sequence])
        for reduces in halves(choice.kind):
            loads[reduces, side] = [
                _count(lanes.topology, [edges[half[reduces][n]] for n in numbers], reduces)
                for numbers in _transfers(half[reduces])
            ]
    phases = [load for run in order for load in loads[run]]
    return Loads(recipe.chunks_per_buffer, int(chain_ps.max()), tuple(phases))


@dataclass(frozen=True, slots=True, eq=False)
class _Lanes:
    """The lanes along one side of all groups that are counted.

    Shapes: `ranks` and `places` [lanes, members], a place for all members of a lane that are alike;
    `chunks` of one block, `group` and `home` [lanes]. Only edges that start on the instance `home`
    count, if there is one.
    """

    topology: Topology
    ranks: IntArray
    places: IntArray
    chunks: IntArray
    group: IntArray
    home: IntArray | None

    def edges(self, steps: Steps, costs: CollectiveCosts) -> _Edges:
        """One step of `steps`, with the chunks of all of them."""
        ranks, home = self.ranks[:, steps.source], self.home
        here = home is None or self.topology.instance_of(ranks) == home[:, None]
        lane, send = np.nonzero(np.broadcast_to(here, ranks.shape))
        at, to = np.tile(steps.source[send], len(steps.target)), steps.target[:, send].ravel()
        lane = np.tile(lane, len(steps.target))
        return _routed(
            self.topology,
            costs,
            steps.charge,
            (self.ranks[lane, at], self.ranks[lane, to]),
            self.chunks[lane] * steps.times * steps.blocks.shape[1],
            (self.places[lane, at], self.places[lane, to]),
            home if home is None else home[lane],
        )

    def chain_ps(self, sequence: Sequence[tuple[Steps, _Edges]]) -> IntArray:
        """Hops on the longest chain of every group through `sequence`: from its end, the longest
        that starts at each place."""
        longest = np.zeros(int(self.places.max()) + 1, dtype=np.int64)
        for steps, edges in reversed(sequence):
            hop, to = _in_a_row(edges, steps.times, len(longest))
            np.maximum.at(longest, edges.at, hop + longest[to])
        found = np.zeros(int(self.group.max()) + 1, dtype=np.int64)
        np.maximum.at(found, self.group, longest[self.places].max(axis=1))
        return found


def _in_a_row(edges: _Edges, times: int, places: int) -> tuple[IntArray, IntArray]:
    """Hops and ends of `times` steps along the same edges: their map of places, composed with
    itself by squaring."""
    if times == 1:
        return edges.hop_ps, edges.to
    onward, hop = np.arange(places), np.zeros(places, dtype=np.int64)
    onward[edges.at], hop[edges.at] = edges.to, edges.hop_ps
    end, total = np.arange(places), np.zeros(places, dtype=np.int64)
    while times:
        if times & 1:
            total, end = total + hop[end], onward[end]
        hop, onward, times = hop + hop[onward], onward[onward], times >> 1
    return total[edges.at], end[edges.at]


def _lanes(choice: Choice, side: int) -> _Lanes:
    """The lanes along a side of the recipes; of an inner side, those on the first instance. What
    lies alike on other instances shares the place of the first one."""
    layout, topology = choice.layout, choice.layout.topology
    found = [choice.recipe(group).orders(side) for group in layout.representatives]
    ranks = np.concatenate(
        [layout.ranks[g][o] for g, (o, _) in zip(layout.representatives, found, strict=True)]
    )
    group = np.repeat(np.arange(len(found)), [len(orders) for orders, _ in found])
    chunks = np.array([each for _, each in found])[group]
    lane = np.arange(len(ranks))[:, None]
    if layout.grid is None:
        places = lane * ranks.shape[1] + np.arange(ranks.shape[1])
        return _Lanes(topology, ranks, places, chunks, group, None)
    chosen = np.array(layout.representatives)
    home = topology.instance_of(layout.ranks[chosen, layout.grid[chosen, 0, 0]])[group]
    places = lane * topology.ranks_per_instance + ranks % topology.ranks_per_instance
    return _Lanes(topology, ranks, places, chunks, group, home)


def _count(topology: Topology, stretch: Sequence[_Edges], reduces: bool) -> PhaseLoad:
    """One stretch of transfers, where its loads are largest."""
    last = max(int(max(e.source.max(initial=0), e.target.max(initial=0))) for e in stretch)
    instances = 1 + last // topology.ranks_per_instance
    table = np.zeros((instances * topology.ranks_per_instance, 4), dtype=np.int64)
    crossed = np.zeros(instances * topology.num_links, dtype=np.int64)
    for edges in stretch:
        columns = {
            Charge.MOVE: ((1 if reduces else 0, edges.target), (2, edges.source)),
            Charge.READ: ((3, edges.target),),
            Charge.WRITE: ((3, edges.source),),
            Charge.NOTHING: (),
        }
        for column, rank in columns[edges.charge]:
            table[:, column] += _summed(rank, edges.chunks, len(table))
        edge, hop = np.nonzero(edges.links >= 0)
        crossed += _summed(edges.links[edge, hop], edges.chunks[edge], len(crossed))
    most = crossed.reshape(instances, topology.num_links).max(axis=0)
    return PhaseLoad(_largest(table), *_wire_loads(topology, most))


def _summed(places: IntArray, amounts: IntArray, size: int) -> IntArray:
    """The sum of the amounts at every place; exact below 2**53."""
    return np.bincount(places, amounts, size).astype(np.int64)


def _largest(table: IntArray) -> tuple[RankLoad, ...]:
    """Distinct rows that no other row exceeds in every column."""
    if (table == table.max(axis=0)).all(axis=1).any():
        table = table.max(axis=0, keepdims=True)
    rows = np.unique(table, axis=0)
    kept = [r for r in rows if not ((rows >= r).all(axis=1) & (rows > r).any(axis=1)).any()]
    return tuple((int(c), int(r), int(s), int(t)) for c, r, s, t in kept)


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
