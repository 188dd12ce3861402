"""The network of a run: topology of the target's instances, and what a collective of a program
costs on it; a transfer to or from the host costs what its chip's link leaves each of its cores.

Which cores the ranks of the mesh are is the placement's to say (`collectives/placement.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwright.collectives.groups.layout import place
from shardwright.collectives.ops import TORUS, CollectiveKind, ReplicaGroups
from shardwright.collectives.placement import place_mesh
from shardwright.collectives.select import alternatives, choose, full_name
from shardwright.collectives.timing.runtimes import CURRENT, Runtime
from shardwright.collectives.timing.times import CollectiveTime, closed_time, in_step, wires_ps
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import PS_PER_S, Target
from shardwright.sim_cluster.network.collective_costs import HOST_LINK, collective_costs
from shardwright.sim_cluster.profiles import under_profile
from shardwright.sim_cluster.timing.actors import CollectiveDuration
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.degraded import Pattern, degraded

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class Network:
    """Prices the collectives of one run."""

    def __init__(
        self,
        target: Target,
        instances: int,
        mesh: Mapping[str, int],
        profile: str,
        placement: str = TORUS,
        settings: Mapping[str, Any] = NO_SETTINGS,
        runtime: Runtime = CURRENT,
    ) -> None:
        self.target = under_profile(target, profile)
        self.mesh, self.runtime = mesh, runtime
        self.topology = cluster_topology(target, instances)
        self.placement = place_mesh(placement, mesh, self.topology)
        self.costs = collective_costs(target, profile, **settings)
        self.host_link = self.target.host_link_bytes_per_s * HOST_LINK[profile]
        self._groups: dict[tuple[str, ...], ReplicaGroups] = {}

    def groups(self, axes: tuple[str, ...]) -> ReplicaGroups:
        """Replica groups over mesh axes, as cores of the topology."""
        if axes not in self._groups:
            self._groups[axes] = self.placement.groups(self.mesh, axes)
        return self._groups[axes]

    def duration(
        self, call: CollectiveCall, patterns: Iterable[Pattern] = ()
    ) -> CollectiveDuration:
        """Time of one collective when all its groups run at once, on instances with the faults of
        `patterns`: one algorithm for all of them, its phases in step."""
        if call.is_transfer:
            return self._transfer(call)
        groups = self.groups(call.axes)
        size, element = larger_side_bytes(call, groups.size), call.dtype.bytes
        kind = CollectiveKind(call.kind)
        # Healthy instances are nowhere slower than faulty ones.
        faulty = sorted({pattern for pattern in patterns if pattern}, key=str) or [()]
        topologies = [degraded(self.topology, pattern) for pattern in faulty]
        layouts = [place(topology, groups) for topology in topologies]
        choices = [
            choose(kind, topology, groups, size, element, self.costs, pairs=call.pairs)
            for topology in topologies
        ]
        priced = []
        for choice in {(c.algorithm, c.inside, c.across): c for c in choices}.values():
            everywhere = [replace(choice, layout=layout) for layout in layouts]
            times = [closed_time(c, size, element, self.costs) for c in everywhere]
            priced.append((in_step(times), everywhere))
        time, everywhere = min(priced, key=lambda pair: pair[0].total_ps)
        time = self._launched(time, kind, groups, size // element)
        wires: dict[int, int] = {}
        for choice in everywhere:
            for number, busy in wires_ps(choice, size, element, self.costs):
                wires[number] = max(busy, wires.get(number, 0))
        demand = self._demand(time, sorted(wires.items()))
        return CollectiveDuration(
            time.total_ps, demand, time.algorithm, time.why, size, groups.size
        )

    def _transfer(self, call: CollectiveCall) -> CollectiveDuration:
        """A transfer over the link of a chip, which its cores in the mesh share evenly: they run
        the same code. The chip's DMA rings for the host move it (documented beside those of the
        cores: 2 on trn1, 4 on trn2), so that a core is only left less of its HBM."""
        size, sharers = larger_side_bytes(call, 1), self._cores_of_a_chip()
        rate = self.host_link / sharers
        total_ps = self.target.core.dma_fixed_ps + round(size / rate * PS_PER_S)
        hbm = self.target.lnc * self.target.hbm_bytes_per_s_per_core
        taken = size * PS_PER_S / total_ps / hbm
        why = f"{sharers} cores of a chip share {self.host_link / 1e9:g} GB/s each way"
        return CollectiveDuration(total_ps, Demand(0.0, hbm=taken), "host link", why, size, 1)

    def _cores_of_a_chip(self) -> int:
        """The most cores of the mesh on a chip."""
        chips = self.placement.slots // self.target.cores_per_chip
        return int(np.bincount(chips.reshape(-1)).max())

    def alternatives(self, call: CollectiveCall) -> dict[str, int]:
        """The time of one collective alone, on healthy instances: under the algorithm that is
        chosen for it, by its name, and under every other there is."""
        if call.is_transfer:
            cost = self._transfer(call)
            return {cost.algorithm: cost.duration_ps}
        groups, element = self.groups(call.axes), call.dtype.bytes
        size, kind = larger_side_bytes(call, groups.size), CollectiveKind(call.kind)
        chosen = choose(kind, self.topology, groups, size, element, self.costs, pairs=call.pairs)
        others = alternatives(kind, self.topology, groups, size, self.costs)
        return {
            name: self._launched(
                closed_time(choice, size, element, self.costs), kind, groups, size // element
            ).total_ps
            for name, choice in {full_name(chosen): chosen, **others}.items()
        }

    def _launched(
        self, time: CollectiveTime, kind: CollectiveKind, groups: ReplicaGroups, elements: int
    ) -> CollectiveTime:
        return self.runtime.launching(time, kind, self.topology, groups, elements)

    def _demand(self, time: CollectiveTime, wires: Sequence[tuple[int, int]]) -> Demand:
        """What a collective takes of each resource, on average over all of its time."""
        core, alone_ps = self.target.core, max(time.total_ps, 1)
        dma = self.target.lnc * core.dma_engines * core.dma_engine_bytes_per_s
        hbm = self.target.lnc * self.target.hbm_bytes_per_s_per_core
        return Demand(
            dma=min(1.0, time.touch_bytes_per_rank * PS_PER_S / alone_ps / dma),
            wires=tuple((number, min(1.0, busy / alone_ps)) for number, busy in wires),
            hbm=time.touch_bytes_per_rank * PS_PER_S / alone_ps / hbm,
        )


def larger_side_bytes(call: CollectiveCall, group_size: int) -> int:
    """Bytes of the larger of source and target of one rank (the nccom convention)."""
    outer, dim, inner = call.source_shape
    source = outer * dim * inner * call.dtype.bytes
    return source * group_size if call.kind == "all_gather" else source
