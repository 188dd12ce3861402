"""One collective on a machine, as `nccom-test` would run it: ranks evenly over instances.

The entry of `shardwright nccom` and of the comparison with published measurements. Ranks are the
first cores of every instance, as the tool takes them; groups and pairs may be given instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups
from shardwright.collectives.select import collective_time
from shardwright.collectives.timing.runtimes import CURRENT, Runtime
from shardwright.collectives.timing.times import CollectiveTime
from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import Target
from shardwright.sim_cluster.network.collective_costs import collective_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Which ranks communicate, and under which assumptions. `settings` replace thresholds and
    constants of `CollectiveCosts`."""

    target: Target
    kind: CollectiveKind
    ranks: int
    instances: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
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
        topology = cluster_topology(self.target, self.instances)
        groups = self.replica_groups()
        costs = collective_costs(self.target, profile, **self.settings)
        pairs = self.pairs or default_pairs(groups.size)
        time = collective_time(
            self.kind, topology, groups, size_bytes, element_bytes, costs, pairs=pairs
        )
        elements = size_bytes // element_bytes
        return self.runtime.launching(time, self.kind, topology, groups, elements)

    def replica_groups(self) -> ReplicaGroups:
        """The groups given, or one group of the first ranks of every instance."""
        if self.groups:
            return ReplicaGroups(self.groups)
        each = range(self.ranks // self.instances)
        starts = [i * self.target.cores for i in range(self.instances)]
        return ReplicaGroups((tuple(start + rank for start in starts for rank in each),))


def default_pairs(ranks: int) -> tuple[tuple[int, int], ...]:
    """Neighbours trade places, 0 with 1, 2 with 3: what the published permute does."""
    swapped: Sequence[int] = [rank ^ 1 if rank ^ 1 < ranks else rank for rank in range(ranks)]
    return tuple(enumerate(swapped))
