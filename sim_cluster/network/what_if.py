"""One collective on a machine, as `nccom-test` would run it: ranks evenly over instances.

The entry of `shardwright nccom` and of the comparison with published measurements. Ranks are the
first cores of every instance, as the tool takes them; groups and pairs may be given instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups
from shardwright.collectives.select import choose
from shardwright.collectives.timing.loads import Loads, schedule_loads
from shardwright.collectives.timing.runtimes import CURRENT, Runtime
from shardwright.collectives.timing.times import CollectiveTime, LoadsOf, closed_time, loads_of
from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import Target
from shardwright.sim_cluster.network.collective_costs import collective_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Which ranks communicate, and under which assumptions. `settings` replace thresholds and
    constants of `CollectiveCosts`; `shares` are what every position of a group sends to each of an
    all_to_all, of any sizes, in parts of one position's whole buffer."""

    target: Target
    kind: CollectiveKind
    ranks: int
    instances: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    shares: tuple[tuple[Fraction, ...], ...] = ()
    runtime: Runtime = CURRENT
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UsageError: SW_NETWORK for instances without EFA, SW_USAGE for ranks that are not
        on them."""
        cores, name = self.target.cores, self.target.name
        if self.instances < 1:
            raise UsageError("SW_USAGE", f"instances require at least 1, got {self.instances}")
        if self.instances > 1 and not self.target.efa_devices:
            raise UsageError(
                "SW_NETWORK",
                f"collectives across instances require EFA, got {self.instances} of {name}",
                hint="use one instance, or a machine with EFA, for example trn1.32xlarge",
            )
        each, rest = divmod(self.ranks, self.instances)
        if rest or not 1 <= each <= cores:
            raise UsageError(
                "SW_USAGE",
                f"ranks require a multiple of the {self.instances} instances and at most {cores} on"
                f" each {name}, got {self.ranks}",
                hint=f"use up to {cores * self.instances} ranks, or more instances",
            )

    def time(self, size_bytes: int, element_bytes: int, profile: str = "nominal") -> CollectiveTime:
        """Time of the collective; `size_bytes` is the larger of source and target of a rank.

        Raises UsageError (SW_USAGE) for groups, pairs, sizes or settings that do not fit.
        """
        try:
            return self._time(size_bytes, element_bytes, profile)
        except CollectiveError as error:
            raise UsageError(
                "SW_USAGE",
                str(error),
                hint=f"{self.target.name} has {self.target.cores} ranks per"
                " instance; --help lists what may be given",
            ) from error

    def _time(self, size_bytes: int, element_bytes: int, profile: str) -> CollectiveTime:
        choice = self.choice(size_bytes, element_bytes, profile)
        costs = collective_costs(self.target, profile, **self.settings)
        elements = size_bytes // element_bytes
        counted: LoadsOf = loads_of
        if self.shares:
            counted = partial(_ragged_loads, counts=self.counts(elements), elements=elements)
        time = closed_time(choice, size_bytes, element_bytes, costs, counted)
        topology = choice.layout.topology
        return self.runtime.launching(time, self.kind, topology, self.replica_groups(), elements)

    def choice(self, size_bytes: int, element_bytes: int, profile: str = "nominal") -> Choice:
        """The algorithm of all groups, and why. Raises CollectiveError for what does not fit."""
        groups = self.replica_groups()
        return choose(
            self.kind,
            cluster_topology(self.target, self.instances),
            groups,
            size_bytes,
            element_bytes,
            collective_costs(self.target, profile, **self.settings),
            pairs=self.pairs or default_pairs(groups.size),
        )

    def far_pairs(self) -> dict[tuple[int, int], int]:
        """The pairs of a permute that no single link joins, with how many links they cross. The
        vendor's page requires pairs to form a ring over physical links; others are timed over their
        routes."""
        if self.kind is not CollectiveKind.COLLECTIVE_PERMUTE:
            return {}
        groups = self.replica_groups()
        topology = cluster_topology(self.target, self.instances)
        pairs = np.array(self.pairs or default_pairs(groups.size), np.int64).reshape(-1, 2)
        ranks = np.array(groups.groups[0], np.int64)[pairs]
        crossed = (topology.route(ranks[:, 0], ranks[:, 1]) >= 0).sum(axis=1)
        inside = topology.instance_of(ranks[:, 0]) == topology.instance_of(ranks[:, 1])
        far = np.flatnonzero((crossed > 1) & inside)
        return {(int(pairs[n, 0]), int(pairs[n, 1])): int(crossed[n]) for n in far}

    def counts(self, elements: int) -> np.ndarray:
        """Elements that go from each position to each, [ranks of a group, ranks of a group], of
        buffers of `elements`. Raises CollectiveError for shares of another number of ranks."""
        size = self.replica_groups().size
        if not self.shares:
            return np.full((size, size), -(-elements // size), np.int64)
        if len(self.shares) != size or any(len(row) != size for row in self.shares):
            raise CollectiveError(
                f"an exchange of {size} ranks requires {size} counts of each, got"
                f" {[len(row) for row in self.shares]}"
            )
        return np.array([[int(share * elements) for share in row] for row in self.shares])

    def replica_groups(self) -> ReplicaGroups:
        """The groups given, or one group of the first ranks of every instance."""
        if self.groups:
            return ReplicaGroups(self.groups)
        each = range(self.ranks // self.instances)
        starts = [i * self.target.cores for i in range(self.instances)]
        return ReplicaGroups((tuple(start + rank for start in starts for rank in each),))


def _ragged_loads(
    choice: Choice, costs: CollectiveCosts, counts: np.ndarray, elements: int
) -> Loads:
    """The loads of an exchange of `counts` elements from each position to each; a chunk is one of
    the `elements` of a buffer."""
    loads = schedule_loads(choice, costs, counts.ravel())
    return replace(loads, chunks_per_buffer=max(1, elements))


def default_pairs(ranks: int) -> tuple[tuple[int, int], ...]:
    """Neighbours trade places, 0 with 1, 2 with 3: what the published permute does."""
    swapped: Sequence[int] = [rank ^ 1 if rank ^ 1 < ranks else rank for rank in range(ranks)]
    return tuple(enumerate(swapped))
