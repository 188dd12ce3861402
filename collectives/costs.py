"""What a collective costs besides links, as numbers the caller gives, and the settings of the
choice of an algorithm.

Values for a machine and a profile come from its data files and the calibration
(`sim_cluster/network/collective_costs.py`); rates of links and EFA devices and the time of a wire
belong to the `Topology`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.collectives.ops import CollectiveError

MESHES = ("flat", "grouped")
RATES = ("rank_copy_bytes_per_s", "rank_reduce_bytes_per_s", "rank_hbm_bytes_per_s")
THRESHOLDS = ("mesh_max_bytes", "rdh_max_bytes", "flat_ring_min_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCosts:
    """What a collective costs besides links.

    Units: `_ps` picoseconds; rates are bytes per second and rank, of payload received; thresholds
    are sizes of the larger of source and target of a rank. A copied byte touches
    memory twice (read, write), a reduced one three times (two reads, one write), so
    `rank_copy_bytes_per_s` is 3/2 of `rank_reduce_bytes_per_s` for one touch rate;
    `rank_hbm_bytes_per_s` is what a rank has of its HBM bank beside the others, for all touches.
    Raises CollectiveError for a value out of range.
    """

    profile: str
    launch_ps: int
    intra_hop_ps: int
    inter_hop_ps: int
    rank_copy_bytes_per_s: int
    rank_reduce_bytes_per_s: int
    rank_hbm_bytes_per_s: int
    efa_efficiency: float
    # flat: every pair of ranks; grouped: between chips, then inside of them.
    mesh: str = "flat"
    mesh_max_bytes: int = 1 << 20
    # 0 turns an algorithm off.
    rdh_max_bytes: int = 0
    kangaring: bool = False
    flat_ring_min_bytes: int = 0
    # Documented: recursive halving and doubling across instances since SDK 2.24 (runtime release
    # notes).
    inter_recursive: bool = True
    # Unknown-default: documented for small groups and sizes; it does not scale, receivers congest
    # (inter-node collectives page).
    inter_mesh_max_instances: int = 4

    def __post_init__(self) -> None:
        positive = (*RATES, "efa_efficiency")
        wrong = {n: getattr(self, n) for n in positive if getattr(self, n) <= 0}
        times = ("launch_ps", "intra_hop_ps", "inter_hop_ps", *THRESHOLDS)
        wrong |= {n: getattr(self, n) for n in times if getattr(self, n) < 0}
        for name, value in wrong.items():
            least = "> 0" if name in positive else ">= 0"
            raise CollectiveError(f"collective costs require {name} {least}, got {value}")
        if self.efa_efficiency > 1:
            raise CollectiveError(
                f"collective costs require efa_efficiency <= 1, got {self.efa_efficiency}"
            )
        if self.mesh not in MESHES:
            raise CollectiveError(
                f"collective costs require mesh {' or '.join(MESHES)}, got {self.mesh!r}"
            )
