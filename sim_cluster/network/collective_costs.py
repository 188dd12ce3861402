"""What collectives cost on a machine under a profile: facts of its data files, and the calibration.

`conservative` and `peak` are the ends of the band that every report shows. Rates follow the DMA
engines of the core, so one fitted share serves every generation.
"""

from __future__ import annotations

from typing import Any

from shardwright.collectives.costs import CollectiveCosts
from shardwright.compiler.machine.network import rank_costs
from shardwright.compiler.machine.target import PS_PER_US, Target
from shardwright.sim_cluster.calibration import constants

REDUCE_AT_PEAK = 0.5  # documented: reducing halves the rate of a DMA engine before v4 (NKI DMA)

# Inferred: 53 of 100 GB/s per node in a published two-node table of trn1; 270 of 400 GB/s and 19.3
# of 25 GB/s per chip reached on trn2 by a public transfer engine; the middle.
EFA_EFFICIENCY = {"conservative": 0.55, "nominal": 0.625, "peak": 0.70}
# Inferred: a permute of trn1 takes typically 14 us (SDK issue 998), less one hop.
CONSERVATIVE_LAUNCH_PS = 12 * PS_PER_US
# Documented: 1 to 2 us per hop (intra-node collectives page); the fast end.
PEAK_HOP_PS = PS_PER_US
# Documented for trn2 (inter-node collectives page).
PEAK_EFA_HOP_PS = 15 * PS_PER_US

# Inferred: no page says what of the link transfers reach, nor what chips share behind it: half of
# it, all, and twice as much for a link of 16 lanes (PCIe 4.0: 31.5 GB/s) instead of 8 (15.8 GB/s).
HOST_LINK = {"conservative": 0.5, "nominal": 1.0, "peak": 2.0}


def collective_costs(target: Target, profile: str, **settings: Any) -> CollectiveCosts:
    """The costs of a rank of `target` under a profile; `settings` replace fields of the result.

    Raises CollectiveError for a setting out of range.
    """
    facts, core = target.collectives, target.core
    values: dict[str, Any] = {"efa_efficiency": EFA_EFFICIENCY[profile]}
    if profile == "conservative":
        values |= {"launch_ps": CONSERVATIVE_LAUNCH_PS}
    elif profile == "peak":
        dma = target.lnc * core.dma_engines * core.dma_engine_bytes_per_s
        values |= {
            "intra_hop_ps": PEAK_HOP_PS,
            "inter_hop_ps": min(PEAK_EFA_HOP_PS, facts.efa_hop_ps),
            "rank_reduce_bytes_per_s": round(dma * REDUCE_AT_PEAK),
        }
    touch = constants()["collective_touch"].under(profile)
    return rank_costs(target, profile, touch, **(values | settings))
