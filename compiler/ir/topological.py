"""Topological order: code that is moved keeps its old order as far as dependencies allow.

The graph of dependencies is the caller's; nodes need no order of their own. Who finds nodes missing
in the answer knows that they wait for each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)
Place = float | tuple[float, ...]


def topological(
    before: Mapping[Node, Iterable[Node]], place: Callable[[Node], Place]
) -> list[Node]:
    """The keys of `before`, each behind what it maps to, the lowest place first among the ready.
    Nodes that wait for each other are left out, and so is what waits for them.
    """
    readers: dict[Node, list[Node]] = {node: [] for node in before}
    waiting = dict.fromkeys(before, 0)
    for node, earlier in before.items():
        for one in earlier:
            readers[one].append(node)
            waiting[node] += 1
    ready = [(place(node), i, node) for i, node in enumerate(before) if not waiting[node]]
    heapq.heapify(ready)
    count, found = len(before), list[Node]()
    while ready:
        node = heapq.heappop(ready)[-1]
        found.append(node)
        for reader in readers[node]:
            waiting[reader] -= 1
            if not waiting[reader]:
                count += 1  # decides between equal places, so that nodes are never compared
                heapq.heappush(ready, (place(reader), count, reader))
    return found
