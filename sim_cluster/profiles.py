"""Profiles of the run: how much of the documented rates a machine is credited with.

They never change a NEFF byte. Every answer shows the band from `conservative` to `peak`. Nothing
here is fitted to a model or a row; `validate` prints how far published runs are from each profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.target import CoreModel, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Factors on documented rates.

    `tensor` scales the tensor clock, `touch` every engine and queue that moves bytes.
    """

    name: str
    tensor: float
    touch: float
    dma: float
    source: str


PROFILES = {
    p.name: p
    for p in (
        Profile(
            name="conservative",
            tensor=0.879,
            touch=0.815,
            dma=1.0,
            source="inferred: the two constants an analytic operation list needs on 12 published"
            " trn1 rows"
            " (median error 6.7 %)",
        ),
        Profile(
            name="nominal",
            tensor=1.0,
            touch=1.0,
            dma=1.0,
            source="documented: clocks and sustained DMA rate (17 GB/s per engine on"
            " NeuronCore-v2)",
        ),
        Profile(
            name="peak",
            tensor=1.0,
            touch=1.0,
            dma=1.6,
            source="documented: theoretical DMA rate, 27.2 GB/s against 17 GB/s sustained per"
            " engine",
        ),
    )
}


def under_profile(target: Target, name: str) -> Target:
    """`target` as the profile sees it."""
    profile = PROFILES[name]
    core = target.core
    clocks = {
        engine: round(hz * (profile.tensor if engine == "tensor" else profile.touch))
        for engine, hz in core.clock_hz.items()
    }
    rate = core.dma_engine_bytes_per_s * profile.touch * profile.dma
    scaled: CoreModel = replace(core, clock_hz=clocks, dma_engine_bytes_per_s=rate)
    return replace(target, core=scaled)
