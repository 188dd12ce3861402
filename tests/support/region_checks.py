"""One region by itself: its time where it shares nothing, and tiles that share bytes."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.isa.program import Region
from shardwright.compiler.isa.region import Tensor
from shardwright.compiler.machine.target import Target
from shardwright.compiler.schedule.allocate import lifetimes, share_bytes
from shardwright.compiler.timing.evaluate import RegionTime, Shares, region_times


def region_time(
    region: Region, tensors: Sequence[Tensor], target: Target, recorded: bool = True
) -> RegionTime:
    """Time of one region that shares nothing; `compute_ps` is 0 unless `recorded`."""
    return region_times(region, tensors, target, (Shares(),), recorded)[0]


def overlaps(region: Region) -> list[str]:
    """Pairs of tiles that share bytes while both are alive: what `allocate` must never produce."""
    lives = lifetimes(region)
    found = []
    for n, a in enumerate(region.tiles):
        for m in range(n):
            b = region.tiles[m]
            apart = not share_bytes(a, b) or lives[n].last < 0 or lives[m].last < 0
            (first, end), (others_first, others_end) = lives[n].span, lives[m].span
            if not apart and first < others_end and others_first < end:
                found.append(f"{region.program.name}: tiles {b.name} and {a.name} overlap")
    return found
