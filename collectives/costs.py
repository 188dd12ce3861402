"""The constants of collective time, each with its source and status, in three profiles.

`conservative` and `peak` are the ends of the band every report shows; `nominal` lies between them
and reproduces the published 8-rank trn1 all-reduce curve. Rates of links and EFA devices belong to
the `Topology`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from collectives.ops import CollectiveError

US = 1_000_000  # picoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCosts:
    """What a collective costs besides links.

    Units: `_ps` picoseconds; rates are bytes per second and rank, of payload received; thresholds
    are `size_bytes` as in `CollectiveOp` (larger of source and target). A copied byte touches
    memory twice (read, write), a reduced one three times (two reads, one write), so
    `rank_copy_bytes_per_s` is 3/2 of `rank_reduce_bytes_per_s` for one touch rate.
    Raises CollectiveError for a value out of range.
    """

    profile: str
    launch_ps: int
    intra_hop_ps: int
    inter_hop_ps: int
    rank_copy_bytes_per_s: int
    rank_reduce_bytes_per_s: int
    efa_efficiency: float
    # Unknown-default: documented for trn2 (mesh below 1 MB); the published trn1 8-rank curve leaves
    # the mesh slope between 1 and 2 MiB.
    mesh_max_bytes: int = 1 << 20
    # Unknown-default: the source says only "large messages" (inter-node collectives page), on trn1
    # and trn1n alone.
    flat_ring_min_bytes: int = 64 << 20
    # Documented: recursive halving and doubling across instances since SDK 2.24 (runtime release
    # notes).
    inter_recursive: bool = True

    def __post_init__(self) -> None:
        optional = ("launch_ps", "intra_hop_ps", "inter_hop_ps", "mesh_max_bytes", "profile")
        for name in (f.name for f in fields(self) if f.name not in optional):
            value = getattr(self, name)
            if name != "inter_recursive" and value <= 0:
                raise CollectiveError(f"collective costs require {name} > 0, got {value}")
        if self.efa_efficiency > 1:
            raise CollectiveError(
                f"collective costs require efa_efficiency <= 1, got {self.efa_efficiency}"
            )


CONSERVATIVE = CollectiveCosts(
    profile="conservative",
    # Inferred: trn1 permute typically 14 us (SDK issue 998) less one hop.
    launch_ps=12 * US,
    # Documented: 1 to 2 us (intra-node collectives page); the slow end.
    intra_hop_ps=2 * US,
    # Inferred: the published 55.9 us two-node all-reduce of 128 B on trn1.
    inter_hop_ps=18 * US,
    # Inferred: touch rate 142.5 GB/s from the 2-rank and 64-rank trn1 tables of 2023.
    rank_copy_bytes_per_s=71_250_000_000,
    rank_reduce_bytes_per_s=47_500_000_000,
    # Inferred: 53 of 100 GB/s per node in the 64-rank table.
    efa_efficiency=0.55,
)

# Nominal is fixed by the 8-rank trn1 curve of 2025-26 (measured, instance inferred), which the line
# 25 us + bytes at 67 GB/s of bus bandwidth fits within 1 % from 4 MiB to 1 GiB. A ring all-reduce
# of 8 ranks has 14 hops, so launch + 14 x 1.5 us = 25 us; and 2 / 67 GB/s = 1 / copy + 1 / reduce
# with copy = 3/2 reduce (touch rate 167.5 GB/s). The same constants give the mesh part of that
# curve (64 KiB to 1 MiB) and the 32-rank all-gather of 2025 without a further fit.
NOMINAL = CollectiveCosts(
    profile="nominal",
    launch_ps=4 * US,  # inferred, as above
    intra_hop_ps=1_500_000,  # documented: 1 to 2 us, the middle
    inter_hop_ps=18
    * US,  # inferred, as in conservative; between the 16 and 24 us two published points ask for
    rank_copy_bytes_per_s=83_750_000_000,  # inferred, as above
    rank_reduce_bytes_per_s=55_833_333_333,  # inferred, as above
    efa_efficiency=0.625,  # inferred: middle of the band
)

PEAK = CollectiveCosts(
    profile="peak",
    launch_ps=4 * US,  # inferred, as in nominal
    intra_hop_ps=1 * US,  # documented: 1 to 2 us, the fast end
    inter_hop_ps=15 * US,  # documented for trn2 (inter-node collectives page)
    # Documented: 16 DMA engines at 17 GB/s sustained (NKI DMA bandwidth guide); reducing at half
    # rate (NKI DMA pages).
    rank_copy_bytes_per_s=272_000_000_000,
    rank_reduce_bytes_per_s=136_000_000_000,
    # Inferred: 270 of 400 GB/s and 19.3 of 25 GB/s per chip reached on trn2 by a public transfer
    # engine.
    efa_efficiency=0.70,
)

PROFILES = {c.profile: c for c in (CONSERVATIVE, NOMINAL, PEAK)}
