"""Classes of ranks that behave alike: colour refinement over the groups of a mesh.

Ranks start with a colour (program and speed); a rank's colour is then hashed with the multiset of
colours in each of its groups until nothing splits any more. Ranks of one class see the same classes
in every group, so one actor per class gives the times of all ranks. Uniform ranks are one class;
one straggler splits only what it touches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from collectives.ops import ReplicaGroups


@dataclass(frozen=True, slots=True)
class RankClasses:
    """`of_rank[r]` is the class of rank r; `members(axes)[c]` the classes met by class c in its
    group over the axes."""

    of_rank: tuple[int, ...]
    groups: Mapping[tuple[str, ...], tuple[frozenset[int], ...]]

    @property
    def count(self) -> int:
        """Number of classes."""
        return max(self.of_rank) + 1

    def peer(self, index: int, steps: int, stride: int) -> int:
        """The class of the rank `steps` places along an axis of `stride` from those of a class."""
        return self.of_rank[self.representative(index) + steps * stride]

    def representative(self, index: int) -> int:
        """The lowest rank of a class."""
        return self.of_rank.index(index)


def refine(
    mesh: Mapping[str, int], axes: Sequence[tuple[str, ...]], colours: Sequence[Hashable]
) -> RankClasses:
    """Stable classes of the ranks of `mesh` under the groups over each entry of `axes`."""
    groups = {a: ReplicaGroups.from_axes(mesh, a).groups for a in axes}
    current = _numbered(colours)
    while True:
        signatures: list[list[Hashable]] = [[c] for c in current]
        for members in groups.values():
            for group in members:
                seen = tuple(sorted(current[r] for r in group))
                for rank in group:
                    signatures[rank].append(seen)
        refined = _numbered([tuple(s) for s in signatures])
        if max(refined) == max(current):
            break
        current = refined
    return RankClasses(tuple(current), {a: _met(current, g) for a, g in groups.items()})


def _numbered(colours: Sequence[Hashable]) -> list[int]:
    order: dict[Hashable, int] = {}
    return [order.setdefault(c, len(order)) for c in colours]


def _met(classes: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[frozenset[int], ...]:
    met: dict[int, frozenset[int]] = {}
    for group in groups:
        together = frozenset(classes[r] for r in group)
        for rank in group:
            met[classes[rank]] = together
    return tuple(met[c] for c in range(max(classes) + 1))
