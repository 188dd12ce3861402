"""Rings over the chips of a topology: Hamiltonian cycles of the links among a set of chips, found
by search.

A full torus has two edge-disjoint cycles that together use every link (documented for trn1:
intra-node collectives page); smaller sets have one cycle, a path, or only an order. The search has
a budget of expansions, so it always ends quickly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from shardwright.collectives.topology import Topology

Graph = Mapping[int, tuple[int, ...]]
SEARCH_BUDGET = 200_000  # expansions; a 4x4 torus needs a few hundred


@lru_cache(maxsize=256)
def chip_cycles(topology: Topology, chips: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Closed orders of `chips` for rings, best first: two edge-disjoint cycles, one cycle, a path,
    or ascending ids.

    An order that is no cycle is still a legal ring: its long edges are routed over several links.
    """
    wanted = set(chips)
    graph = {
        c: tuple(n for n in near if n in wanted)
        for c, near in topology.neighbours().items()
        if c in wanted
    }
    if len(chips) < 3:
        return (tuple(sorted(chips)),)
    pair = edge_disjoint_pair(graph)
    if pair:
        return pair
    cycle = next(hamiltonian_orders(graph, closed=True), None)
    order = cycle or next(hamiltonian_orders(graph, closed=False), None) or sorted(chips)
    return (tuple(order),)


def edge_disjoint_pair(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Two Hamiltonian cycles that share no edge and use all, or None when the search finds none."""
    if any(len(near) != 4 for near in graph.values()):
        return None
    for cycle in hamiltonian_orders(graph, closed=True):
        rest = _without(graph, cycle)
        other = _follow(rest)
        if len(other) == len(graph):
            return tuple(cycle), tuple(other)
    return None


def hamiltonian_orders(graph: Graph, *, closed: bool) -> Iterator[list[int]]:
    """Orders that visit every node once along edges, from the smallest node; `closed` ones return
    to it."""
    start = min(graph)
    path, used = [start], {start}
    choices = [iter(graph[start])]
    for _ in range(SEARCH_BUDGET):
        if not choices:
            return
        node = next((n for n in choices[-1] if n not in used), None)
        if node is None:
            choices.pop()
            used.discard(path.pop())
            continue
        path.append(node)
        used.add(node)
        choices.append(iter(graph[node]))
        if len(path) == len(graph) and (not closed or start in graph[node]):
            yield list(path)


def _without(graph: Graph, cycle: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """`graph` less the edges of `cycle`."""
    near = {n: {cycle[i - 1], cycle[(i + 1) % len(cycle)]} for i, n in enumerate(cycle)}
    return {n: tuple(m for m in others if m not in near[n]) for n, others in graph.items()}


def _follow(graph: Graph) -> list[int]:
    """The cycle through the smallest node of a graph whose nodes all have degree two."""
    start = min(graph)
    path = [start, graph[start][0]]
    while path[-1] != start:
        a, b = graph[path[-1]]
        path.append(b if a == path[-2] else a)
    return path[:-1]
