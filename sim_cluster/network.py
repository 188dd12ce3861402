"""The network of a run: topology of the target's instances, and what a collective of a program
costs on it.

Which cores the ranks of the mesh are is the placement's to say (`collectives/placement.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from collectives.cost import CollectiveTime, collective_time
from collectives.costs import PROFILES as COLLECTIVE_PROFILES
from collectives.costs import CollectiveCosts
from collectives.ops import CollectiveKind, ReplicaGroups
from collectives.placement import TORUS, place_mesh
from collectives.topology import Topology, torus
from compiler.isa.program import CollectiveCall
from compiler.target import PS_PER_S, Target
from sim_cluster.contention import Demand
from sim_cluster.run_timing import CollectiveDuration


def cluster_topology(target: Target, instances: int) -> Topology:
    """The torus of one instance of `target`, `instances` times, joined by EFA."""
    assert target.torus is not None, target.name  # jobs refuse switched machines (SW_NETWORK)
    rates = (round(target.link_bytes_per_s), round(target.efa_bytes_per_s), target.efa_devices)
    return _topology(target.torus, target.cores_per_chip, instances, rates)


@lru_cache(maxsize=64)
def _topology(
    shape: tuple[int, int], ranks_per_chip: int, instances: int, rates: tuple[int, int, int]
) -> Topology:
    """Topologies are compared by identity, and choices are cached per topology: build each once."""
    link, efa, devices = rates
    return torus(
        *shape,
        ranks_per_chip=ranks_per_chip,
        link_bytes_per_s=link,
        instances=instances,
        efa_bytes_per_s=efa if instances > 1 else 0,
        efa_devices=devices if instances > 1 else 0,
    )


class Network:
    """Prices the collectives of one run."""

    def __init__(
        self,
        target: Target,
        instances: int,
        mesh: Mapping[str, int],
        profile: str,
        placement: str = TORUS,
    ) -> None:
        self.target = target
        self.mesh = mesh
        self.topology = cluster_topology(target, instances)
        self.placement = place_mesh(placement, mesh, self.topology)
        self.costs = _of_rank(COLLECTIVE_PROFILES[profile], target.lnc)
        self._groups: dict[tuple[str, ...], ReplicaGroups] = {}

    def groups(self, axes: tuple[str, ...]) -> ReplicaGroups:
        """Replica groups over mesh axes, as cores of the topology."""
        if axes not in self._groups:
            self._groups[axes] = self.placement.groups(self.mesh, axes)
        return self._groups[axes]

    def duration(self, call: CollectiveCall) -> CollectiveDuration:
        """Time of one collective when all its groups run at once."""
        groups = self.groups(call.axes)
        size = larger_side_bytes(call, groups.size)
        kind = CollectiveKind(call.kind)
        time = collective_time(
            kind, self.topology, groups, size, call.dtype.bytes, self.costs, pairs=call.pairs
        )
        return CollectiveDuration(
            time.total_ps, self._demand(time), time.algorithm, time.why, size, groups.size
        )

    def _demand(self, time: CollectiveTime) -> Demand:
        """What a collective takes of each resource while its data moves."""
        core, target, link = self.target.core, self.target, self.target.link_bytes_per_s
        wire_s = max(time.total_ps - time.launch_ps, 1) / PS_PER_S
        dma = target.lnc * core.dma_engines * core.dma_engine_bytes_per_s
        efa = target.efa_bytes_per_s * self.costs.efa_efficiency / max(1, target.efa_devices)
        return Demand(
            dma=min(1.0, time.touch_bytes_per_rank / wire_s / dma),
            link=min(1.0, time.link_bytes / wire_s / link) if link else 0.0,
            efa=min(1.0, time.efa_bytes / wire_s / efa) if efa else 0.0,
        )


def _of_rank(costs: CollectiveCosts, lnc: int) -> CollectiveCosts:
    """Costs of a rank that is a logical core: it moves data with the DMA engines of all its
    physical cores (inferred; documented is that an LNC 2 core has the collective cores of both).
    """
    return replace(
        costs,
        rank_copy_bytes_per_s=costs.rank_copy_bytes_per_s * lnc,
        rank_reduce_bytes_per_s=costs.rank_reduce_bytes_per_s * lnc,
    )


def larger_side_bytes(call: CollectiveCall, group_size: int) -> int:
    """Bytes of the larger of source and target of one rank (the nccom convention)."""
    outer, dim, inner = call.source_shape
    source = outer * dim * inner * call.dtype.bytes
    return source * group_size if call.kind == "all_gather" else source
