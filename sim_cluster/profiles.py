"""Profiles of the run: how much of the documented rates a machine is credited with.

They never change a NEFF byte. Every answer shows the band from `conservative` to `peak`. Two
factors are fitted (`calibration.toml`); `validate` prints how far published runs are from each
profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.compiler.machine.target import Target
from shardwright.sim_cluster.calibration import constants

STREAMING = "streaming"
STALL_RECOVERY = "stall_recovery"
PEAK_DMA = 1.6
"""Documented: theoretical DMA rate, 27.2 GB/s against 17 GB/s sustained per engine (NKI DMA
pages); the peak profile's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a run credits the machine with.

    `streaming` scales the clocks of Vector, Scalar and GpSimd and the rate of the DMA engines,
    `dma` that rate again; `stall_recovery` as in `CoreModel`.
    """

    name: str
    streaming: float
    stall_recovery: float
    dma: float = 1.0


def fitted_profile(name: str) -> Profile:
    """The profile `name` with the fitted constants of `calibration.toml`."""
    fitted = constants()
    return Profile(
        name=name,
        streaming=fitted[STREAMING].under(name),
        stall_recovery=fitted[STALL_RECOVERY].under(name),
        dma=PEAK_DMA if name == "peak" else 1.0,
    )


NAMES = ("conservative", "nominal", "peak")
PROFILES = {name: fitted_profile(name) for name in NAMES}


def under_profile(target: Target, name: str) -> Target:
    """`target` as the profile sees it."""
    return credited(target, PROFILES[name])


def credited(target: Target, profile: Profile) -> Target:
    """`target` with what `profile` credits it with."""
    core = target.core
    clocks = {
        engine: hz if engine == "tensor" else round(hz * profile.streaming)
        for engine, hz in core.clock_hz.items()
    }
    rate = core.dma_engine_bytes_per_s * profile.streaming * profile.dma
    scaled = replace(
        core,
        clock_hz=clocks,
        dma_engine_bytes_per_s=rate,
        stall_recovery=profile.stall_recovery,
    )
    return replace(target, core=scaled)
