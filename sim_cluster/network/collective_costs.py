"""What collectives cost on a machine under a profile: facts of its data files, and the calibration.

`conservative` and `peak` are the ends of the band that every report shows. Rates follow the DMA
engines of the core, so one fitted share serves every generation.
"""

from __future__ import annotations

from typing import Any

from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.timing.times import COPY_TOUCHES, REDUCE_TOUCHES
from shardwright.compiler.machine.target import Target
from shardwright.sim_cluster.calibration import constants

US = 1_000_000  # picoseconds
REDUCE_AT_PEAK = 0.5  # documented: reducing halves the rate of a DMA engine before v4 (NKI DMA)

# Inferred: 53 of 100 GB/s per node in a published two-node table of trn1; 270 of 400 GB/s and 19.3
# of 25 GB/s per chip reached on trn2 by a public transfer engine; the middle.
EFA_EFFICIENCY = {"conservative": 0.55, "nominal": 0.625, "peak": 0.70}
# Inferred: a permute of trn1 takes typically 14 us (SDK issue 998), less one hop.
CONSERVATIVE_LAUNCH_PS = 12 * US
# Documented: 1 to 2 us per hop (intra-node collectives page); the fast end.
PEAK_HOP_PS = 1 * US
# Documented for trn2 (inter-node collectives page).
PEAK_EFA_HOP_PS = 15 * US

# Inferred: no page says what of the link transfers reach, nor what chips share behind it: half of
# it, all, and twice as much for a link of 16 lanes (PCIe 4.0: 31.5 GB/s) instead of 8 (15.8 GB/s).
HOST_LINK = {"conservative": 0.5, "nominal": 1.0, "peak": 2.0}


def collective_costs(target: Target, profile: str, **settings: Any) -> CollectiveCosts:
    """The costs of a rank of `target`; `settings` replace fields of the result.

    A rank is a logical core: it moves data with the DMA engines of all its physical cores
    (inferred; documented is that an LNC 2 core has the collective cores of both). A step inside an
    instance costs the fixed time of one DMA transfer (documented, NKI DMA bandwidth guide), the
    semaphore that tells the peer (documented to be how collective cores meet: compute and
    communication overlap page) and, in the topology, the wires it crosses.
    Raises CollectiveError for a setting out of range.
    """
    facts, core = target.collectives, target.core
    dma = target.lnc * core.dma_engines * core.dma_engine_bytes_per_s
    touches = COPY_TOUCHES * dma * constants()["collective_touch"].under(profile)
    peak = profile == "peak"
    values: dict[str, Any] = {
        "profile": profile,
        "launch_ps": CONSERVATIVE_LAUNCH_PS if profile == "conservative" else facts.launch_ps,
        "intra_hop_ps": PEAK_HOP_PS if peak else core.dma_fixed_ps + core.semaphore_ps,
        "inter_hop_ps": min(PEAK_EFA_HOP_PS, facts.efa_hop_ps) if peak else facts.efa_hop_ps,
        "rank_copy_bytes_per_s": round(touches / COPY_TOUCHES),
        "rank_reduce_bytes_per_s": round(
            dma * REDUCE_AT_PEAK if peak else touches / REDUCE_TOUCHES
        ),
        "rank_hbm_bytes_per_s": int(target.lnc * target.hbm_bytes_per_s_per_core),
        "efa_efficiency": EFA_EFFICIENCY[profile],
        "mesh": facts.mesh,
        "mesh_max_bytes": facts.mesh_max_bytes,
        "rdh_max_bytes": facts.rdh_max_bytes,
        "kangaring": facts.kangaring,
        "flat_ring_min_bytes": facts.flat_ring_min_bytes,
    }
    return CollectiveCosts(**(values | settings))
