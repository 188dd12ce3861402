"""One kernel by itself: its time where it shares nothing, and tiles that share bytes."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.isa.kernel import Tensor
from shardwright.compiler.isa.program import Kernel
from shardwright.compiler.machine.target import Target
from shardwright.compiler.schedule.allocate import lifetimes, share_bytes
from shardwright.compiler.timing.evaluate import KernelTime, Shares, kernel_times


def kernel_time(
    kernel: Kernel, tensors: Sequence[Tensor], target: Target, recorded: bool = True
) -> KernelTime:
    """Time of one kernel that shares nothing; `compute_ps` is 0 unless `recorded`."""
    return kernel_times(kernel, tensors, target, (Shares(),), recorded)[0]


def overlaps(kernel: Kernel) -> list[str]:
    """Pairs of tiles that share bytes while both are alive: what `allocate` must never produce."""
    lives = lifetimes(kernel)
    found = []
    for n, a in enumerate(kernel.tiles):
        for m in range(n):
            b = kernel.tiles[m]
            apart = not share_bytes(a, b) or lives[n].last < 0 or lives[m].last < 0
            (first, end), (others_first, others_end) = lives[n].span, lives[m].span
            if not apart and first < others_end and others_first < end:
                found.append(f"{kernel.program.name}: tiles {b.name} and {a.name} overlap")
    return found
