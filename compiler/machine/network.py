"""The network of a machine: how its chips are wired, what collectives on it cost, and how long one
is expected to take by those who order code around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.ops import CollectiveKind, ReplicaGroups
from shardwright.collectives.select import collective_time
from shardwright.collectives.timing.times import COPY_TOUCHES, REDUCE_TOUCHES
from shardwright.collectives.topology import Tier, Topology, line, ring, switched, torus, unlinked
from shardwright.compiler.machine.target import PS_PER_S, Target

EXPECTED_TOUCH = 0.3
"""Share of a core's DMA engines that collectives are expected to reach: what published all-reduces
do (`collective_touch` in sim_cluster/calibration.toml). Only the order of code follows from it.
"""
EXPECTED_EFA = 0.6  # of EFA's rate, the same (`EFA_EFFICIENCY` in sim_cluster)
_KINDS = {kind.value: kind for kind in CollectiveKind}


def cluster_topology(target: Target, instances: int) -> Topology:
    """The chips of `target` as its data file wires them, `instances` times, joined by EFA."""
    rates = tuple(round(rate) for rate in target.link_bytes_per_s)
    tier = Tier(link_latency_ps=target.collectives.wire_ps, instances=instances)
    if instances > 1:
        tier |= Tier(efa_bytes_per_s=round(target.efa_bytes_per_s), efa_devices=target.efa_devices)
    per_chip = target.cores_per_chip
    match target.topology:
        case "torus":
            return torus(*target.shape, ranks_per_chip=per_chip, link_bytes_per_s=rates, **tier)
        case "switch":
            levels = list(zip(target.shape, rates, strict=True))
            return switched(target.chips, levels, ranks_per_chip=per_chip, **tier)
        case "none":
            return unlinked(ranks_per_chip=per_chip, **tier)
        case _:
            make = ring if target.topology == "ring" else line
            return make(target.chips, ranks_per_chip=per_chip, link_bytes_per_s=rates[0], **tier)


def rank_costs(target: Target, profile: str, touch: float, **settings: Any) -> CollectiveCosts:
    """What collectives cost a rank of `target`, which reach a share of the rate of its DMA engines
    (`touch`). `settings` replace fields of the result; that of EFA (`efa_efficiency`) is always
    one of them.

    A rank is a logical core: it moves data with the DMA engines of all its physical cores
    (inferred; documented is that an LNC 2 core has the collective cores of both). A step inside an
    instance costs the fixed time of one DMA transfer (documented, NKI DMA bandwidth guide), the
    semaphore that tells the peer (documented to be how collective cores meet: compute and
    communication overlap page) and, in the topology, the wires it crosses.
    Raises CollectiveError for a setting out of range.
    """
    facts, core = target.collectives, target.core
    touches = COPY_TOUCHES * target.lnc * core.dma_engines * core.dma_engine_bytes_per_s * touch
    same = ("launch_ps", "mesh", "mesh_max_bytes", "rdh_max_bytes", "kangaring")
    values: dict[str, Any] = {
        "profile": profile,
        **{name: getattr(facts, name) for name in (*same, "flat_ring_min_bytes")},
        "intra_hop_ps": core.dma_fixed_ps + core.semaphore_ps,
        "inter_hop_ps": facts.efa_hop_ps,
        "rank_copy_bytes_per_s": round(touches / COPY_TOUCHES),
        "rank_reduce_bytes_per_s": round(touches / REDUCE_TOUCHES),
        "rank_hbm_bytes_per_s": int(target.lnc * target.hbm_bytes_per_s_per_core),
    }
    return CollectiveCosts(**(values | settings))


def expected_ps(
    target: Target,
    kind: str,
    size_bytes: int,
    element_bytes: int,
    group_size: int,
    pairs: Sequence[tuple[int, int]] = (),
) -> int:
    """Picoseconds of a collective of `kind`, or of a transfer to or from the host (any other), of
    `size_bytes` (the larger side of a rank) over groups of `group_size` cores side by side.

    Where a group lies on the machine is not known when code is made: axes that are not the last
    have longer ways. Equal programs need equal answers, so nothing of a run is in it. Groups that
    nothing connects (the run refuses them) take no time.
    """
    if kind not in _KINDS:
        rate = target.host_link_bytes_per_s / target.cores_per_chip
        return target.core.dma_fixed_ps + round(size_bytes * PS_PER_S / rate)
    instances = -(-group_size // target.cores)
    if group_size == 1 or (instances > 1 and not target.efa_devices):
        return 0
    ranks = range(max(1, target.cores * instances // group_size) * group_size)
    groups = ReplicaGroups(tuple(tuple(ranks[at : at + group_size]) for at in ranks[::group_size]))
    costs = rank_costs(target, "expected", EXPECTED_TOUCH, efa_efficiency=EXPECTED_EFA)
    topology = cluster_topology(target, instances)
    time = collective_time(
        _KINDS[kind], topology, groups, size_bytes, element_bytes, costs, pairs=pairs
    )
    return time.total_ps
