"""Which nodes of a graph are one part: as few parts as there can be, without a circle of parts.

A node's level counts the changes from compiled code to the host on the worst way to it. Nodes of
one level and one side are one part: none of them waits for a node of another part that waits for
one of them. A way with so many changes needs a part for each stretch of it, so no division has
fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

N = TypeVar("N", bound=Hashable)
S = TypeVar("S")
Side = tuple[int, bool]
"""(level, whether it is compiled) of a part; in order, a part waits for earlier ones alone."""


def sides(
    nodes: Sequence[N], operands: Callable[[N], Iterable[N]], compiled: Collection[N]
) -> dict[N, Side]:
    """The part of each node; `nodes` are in topological order, operands of other nodes do not
    count."""
    found: dict[N, Side] = {}
    for node in nodes:
        is_compiled = node in compiled
        level = 0
        for operand in operands(node):
            if operand in found:
                before, was_compiled = found[operand]
                level = max(level, before + (was_compiled and not is_compiled))
        found[node] = level, is_compiled
    return found


def without_small(
    nodes: Sequence[N],
    operands: Callable[[N], Iterable[N]],
    compiled: Collection[N],
    count: Callable[[N], int],
    least: int,
) -> dict[N, Side]:
    """`sides`, with compiled parts of fewer than `least` operators on the host; `count` says how
    many operators a node is. A graph that is compiled as a whole is, however small."""
    kept = set(compiled)
    while True:
        found = sides(nodes, operands, kept)
        sizes: dict[Side, int] = {}
        for node, side in found.items():
            sizes[side] = sizes.get(side, 0) + count(node)
        small = {side for side, size in sizes.items() if side[1] and size < least}
        if not small or len(kept) == len(nodes):
            return found
        kept -= {node for node, side in found.items() if side in small}


class RefusedError(Exception):
    """Nodes of a part that cannot be compiled, and why."""

    def __init__(self, nodes: Mapping[Any, str]) -> None:
        super().__init__("; ".join(f"{node}: {reason}" for node, reason in nodes.items()))
        self.nodes = nodes


def divided(split: Callable[[Mapping[N, str]], S], refusals: Callable[[S], Mapping[N, str]]) -> S:
    """A division of which nothing is refused: `split` divides, but for nodes that were refused, and
    `refusals` says which nodes of a division do not compile, and why; none where all do."""
    refused: dict[N, str] = {}
    while True:
        found = split(refused)
        more = refusals(found)
        if not more:
            return found
        refused |= more
