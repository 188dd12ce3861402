"""Classes of ranks that behave alike: colour refinement over the groups of a mesh and the HBM banks
of its chips.

Ranks start with a colour (program, faults); a rank's colour is then hashed with the multiset of
colours in each of its groups until nothing splits any more. Ranks of one class see the same classes
in every group, so one actor per class gives the times of all ranks. Uniform ranks are one class;
one straggler splits only what it touches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardwright.collectives.ops import ReplicaGroups

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankClasses:
    """`of_rank[r]` is the class of rank r; `groups[axes][c]` the classes met by class c in its
    group over the axes; `banks[c]` the classes of the other cores on its HBM bank."""

    of_rank: tuple[int, ...]
    groups: Mapping[tuple[str, ...], tuple[frozenset[int], ...]]
    banks: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """Number of classes."""
        return len(self._ranks)

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(max(self.of_rank) + 1)]
        for rank, index in enumerate(self.of_rank):
            found[index].append(rank)
        return tuple(map(tuple, found))

    def ranks(self, index: int) -> tuple[int, ...]:
        """The ranks of a class, ascending."""
        return self._ranks[index]

    def mates(self, index: int) -> tuple[int, ...]:
        """The classes of the other cores on the HBM bank of a class, one entry per core."""
        return self.banks[index] if self.banks else ()

    def peer(self, index: int, steps: int, stride: int) -> int:
        """The class of the rank `steps` places along an axis of `stride` from those of a class."""
        return self.of_rank[self.representative(index) + steps * stride]

    def representative(self, index: int) -> int:
        """The lowest rank of a class."""
        return self._ranks[index][0]


def refine(
    mesh: Mapping[str, int],
    axes: Iterable[tuple[str, ...]],
    colours: Sequence[Hashable],
    banks: Sequence[int] = (),
) -> RankClasses:
    """Stable classes of the ranks of `mesh` under the groups over each entry of `axes` and, where
    given, under the bank of every rank; banks may have different numbers of ranks."""
    groups = {a: np.array(ReplicaGroups.from_axes(mesh, a).groups) for a in axes}
    shared = _bank_tables(banks)
    tables = [*groups.values(), *shared]
    current = _numbered(colours)
    while True:
        columns = [current, *(_seen(current, table) for table in tables)]
        refined = _numbered(list(zip(*(column.tolist() for column in columns), strict=True)))
        if refined.max() == current.max():
            break
        current = refined
    met = {a: tuple(map(frozenset, _met(current, [g]))) for a, g in groups.items()}
    neighbours = tuple(_others(_met(current, shared))) if shared else ()
    return RankClasses(tuple(current.tolist()), met, neighbours)


def _bank_tables(banks: Sequence[int]) -> list[IntArray]:
    """The ranks of every bank as rows, one table per number of ranks on a bank: a mesh that does
    not fill its last chip leaves a bank with fewer."""
    ranks: dict[int, list[int]] = {}
    for rank, bank in enumerate(banks):
        ranks.setdefault(bank, []).append(rank)
    by_size: dict[int, list[list[int]]] = {}
    for members in ranks.values():
        by_size.setdefault(len(members), []).append(members)
    return [np.array(by_size[size]) for size in sorted(by_size)]


def _numbered(colours: Sequence[Hashable]) -> IntArray:
    """Colours as numbers in the order of their first rank."""
    order: dict[Hashable, int] = {}
    return np.array([order.setdefault(c, len(order)) for c in colours])


def _seen(current: IntArray, table: IntArray) -> IntArray:
    """For every rank, a number for the multiset of colours of its group; -1 where it has none."""
    _, number = np.unique(np.sort(current[table], axis=1), axis=0, return_inverse=True)
    found = np.full(len(current), -1, dtype=np.int64)
    found[table] = number.reshape(-1, 1)
    return found


def _met(classes: IntArray, tables: Sequence[IntArray]) -> list[list[int]]:
    """For every class, the classes of a group it is in, ascending, one entry per rank; every rank
    is in one of the tables."""
    met: dict[int, list[int]] = {}
    for table in tables:
        for members in np.unique(np.sort(classes[table], axis=1), axis=0).tolist():
            for index in set(members):
                met[index] = members
    return [met[c] for c in range(len(met))]


def _others(met: Sequence[Sequence[int]]) -> Iterable[tuple[int, ...]]:
    """The classes that share a bank with each class, less one core of its own."""
    for index, members in enumerate(met):
        others = list(members)
        others.remove(index)
        yield tuple(others)
