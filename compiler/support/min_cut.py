"""Minimum vertex cuts of small flow networks, by augmenting paths.

Nodes are values of a graph, weights what keeping the value costs: accumulated gradients between the
sums over samples and the optimizer, or what a layer keeps for its backward pass. Such networks fall
apart into small components, so that each cut is found on a handful of nodes however large the model
is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from shardwright.compiler.support.families import Families
from shardwright.compiler.support.walks import reached

Node = TypeVar("Node", bound=Hashable)
UNCUTTABLE = 1 << 62


class FlowNetwork(Generic[Node]):
    """Nodes with weights and edges; sources are where flow enters, sinks where it leaves."""

    def __init__(
        self,
        weights: Mapping[Node, int],
        edges: Iterable[tuple[Node, Node]],
        sources: Iterable[Node],
        sinks: Iterable[Node],
    ) -> None:
        self.weights = weights
        self.after: dict[Node, list[Node]] = {node: [] for node in weights}
        self.families = Families[Node]()
        for a, b in edges:
            self.after[a].append(b)
            self.families.join(a, b)
        self.sources = set(sources)
        self.sinks = set(sinks)

    def minimum_cut(self) -> list[Node]:
        """The lightest set of nodes that meets every path, nearest to the sinks among equals.

        Raises ValueError when a path has only uncuttable nodes. Order: that of `weights`.
        """
        components: dict[Node, list[Node]] = {}
        for node in self.weights:
            components.setdefault(self.families.of(node), []).append(node)
        cut = {node for nodes in components.values() for node in _Flow(self, nodes).cut()}
        return [node for node in self.weights if node in cut]


class _Flow(Generic[Node]):
    """Residual network of one component; every node is an entry (node, 0) and an exit (node, 1)."""

    def __init__(self, network: FlowNetwork[Node], component: Sequence[Node]) -> None:
        self.component = component
        self.sources = [n for n in component if n in network.sources]
        self.sinks = {n for n in component if n in network.sinks}
        self.room: dict[tuple[Node, int], dict[tuple[Node, int], int]] = {}
        for node in component:
            self._edge((node, 0), (node, 1), network.weights[node])
            for target in network.after[node]:
                self._edge((node, 1), (target, 0), UNCUTTABLE)

    def _edge(self, a: tuple[Node, int], b: tuple[Node, int], room: int) -> None:
        self.room.setdefault(a, {})[b] = room
        self.room.setdefault(b, {}).setdefault(a, 0)

    def cut(self) -> set[Node]:
        """Maximum flow, then the full nodes at the border of what still reaches a sink: their exit
        does, their entry does not.
        """
        self._saturate()
        reaches = reached([(n, 1) for n in self.sinks], self._with_room_to)
        return {n for n in self.component if (n, 1) in reaches and (n, 0) not in reaches}

    def _with_room_to(self, at: tuple[Node, int]) -> Iterable[tuple[Node, int]]:
        return (origin for origin in self.room[at] if self.room[origin][at] > 0)

    def _saturate(self) -> None:
        """Push flow along shortest augmenting paths until there is none."""
        while (path := self._augmenting_path()) is not None:
            steps = list(pairwise(path))
            amount = min(self.room[a][b] for a, b in steps)
            if amount >= UNCUTTABLE // 2:
                raise ValueError("a path has no node that may be cut")
            for a, b in steps:
                self.room[a][b] -= amount
                self.room[b][a] += amount

    def _augmenting_path(self) -> list[tuple[Node, int]] | None:
        """A path with room from a source to a sink."""
        came: dict[tuple[Node, int], tuple[Node, int] | None] = {(n, 0): None for n in self.sources}
        todo = deque(came)
        while todo:
            at = todo.popleft()
            if at[1] == 1 and at[0] in self.sinks:
                return _walk_back(came, at)
            for target, room in self.room[at].items():
                if room > 0 and target not in came:
                    came[target] = at
                    todo.append(target)
        return None


def _walk_back(
    came: Mapping[tuple[Node, int], tuple[Node, int] | None], at: tuple[Node, int]
) -> list[tuple[Node, int]]:
    """The path that led to `at`, from its source."""
    path = [at]
    while (before := came[path[-1]]) is not None:
        path.append(before)
    return path[::-1]
