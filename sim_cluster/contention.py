"""What collectives in flight and compute leave each other: DMA engines, HBM, links, EFA devices.

A DMA engine serves its rings in turn and changes ring at the end of a packet, so that rings that
all want more than there is get bandwidth in proportion to their packets (documented: compute and
communication overlap page); links and EFA devices are shared evenly (our choice, no page says).
What a ring does not want goes to the others. Cores that share an HBM bank have even parts of it,
and what others do not want; collectives and compute of a core share its part as they share its DMA
engines, where their bytes pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

COMPUTE_PACKET_BYTES = 4096  # documented: default of NEURON_RT_DBG_DMA_PACKETIZATION_SIZE
COLLECTIVE_PACKET_BYTES = 65536  # documented: default and most of NEURON_RT_DBG_CC_DMA_PACKET_SIZE


@dataclass(frozen=True, slots=True)
class Demand:
    """Shares of a core's DMA engines, of the links and EFA devices of an instance (by number, where
    it takes most) and of the core's even part of an HBM bank that a collective takes when it runs
    alone.
    """

    dma: float
    wires: tuple[tuple[int, float], ...] = ()
    hbm: float = 0.0


@dataclass(frozen=True, slots=True)
class Packets:
    """Bytes per DMA packet: of compute, and of each collective stream (the last one serves the
    streams behind it).
    """

    compute_bytes: int = COMPUTE_PACKET_BYTES
    stream_bytes: tuple[int, ...] = (COLLECTIVE_PACKET_BYTES,)

    def as_dict(self) -> dict[str, object]:
        """Plain data, as manifests and reports hold it."""
        return {"compute_bytes": self.compute_bytes, "stream_bytes": list(self.stream_bytes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Packets:
        """Inverse of `as_dict`; what is not there has its default."""
        return cls(
            int(data.get("compute_bytes", COMPUTE_PACKET_BYTES)),
            tuple(map(int, data.get("stream_bytes", (COLLECTIVE_PACKET_BYTES,)))),
        )

    def of(self, stream: int) -> int:
        """The packet of a stream."""
        return self.stream_bytes[min(stream, len(self.stream_bytes) - 1)]


DEFAULT_PACKETS = Packets()


def shares(demands: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Weighted max-min fair shares of one resource: nobody gets more than it wants, and who gets
    less has as much per weight as anybody.
    """
    given = list(demands)
    left, weight = 1.0, float(sum(weights))
    order = sorted(range(len(demands)), key=lambda i: demands[i] / weights[i])
    for i in order:
        given[i] = min(demands[i], left * weights[i] / weight)
        left -= given[i]
        weight -= weights[i]
    return given


def bank_shares(wanted: Sequence[float]) -> list[float]:
    """What each core of an HBM bank gets of it, in even shares; `wanted` likewise. Cores are served
    evenly (inferred: no page says).
    """
    cores = len(wanted)
    return [cores * got for got in shares([w / cores for w in wanted], [1.0] * cores)]


@lru_cache(maxsize=4096)
def core_rates(
    jobs: tuple[tuple[Demand, int], ...], packets: Packets, hbm: float = 1.0
) -> tuple[tuple[float, ...], float, float]:
    """Speed of each collective in flight on a core, 1 when undisturbed; the share of the DMA
    engines that compute has, and its HBM bandwidth in even shares. `jobs` are demands with streams;
    `hbm` is what the core has of its bank; compute takes what it can get.
    """
    weights = [float(packets.of(stream)) for _, stream in jobs]
    dma = [demand.dma for demand, _ in jobs]
    memory = [demand.hbm / hbm for demand, _ in jobs]
    shared = [(_beside(wanted, weights, packets), wanted) for wanted in (dma, memory)]
    wires = _wire_rates([demand for demand, _ in jobs])
    rates = tuple(
        min((got[n] / wanted[n] for got, wanted in shared if wanted[n] > 0), default=1.0)
        for n in range(len(jobs))
    )
    rates = tuple(map(min, rates, wires))
    # What is slow for want of one resource takes less of the others.
    used = [[w * r for w, r in zip(wanted, rates, strict=True)] for wanted in (dma, memory)]
    compute, left = (_beside(taken, weights, packets)[-1] for taken in used)
    return rates, compute, left * hbm


def _wire_rates(demands: Sequence[Demand]) -> list[float]:
    """Speed of each collective when those that meet on a link or device share it evenly."""
    rates = [1.0] * len(demands)
    met: dict[int, list[tuple[int, float]]] = {}
    for job, demand in enumerate(demands):
        for wire, wanted in demand.wires:
            met.setdefault(wire, []).append((job, wanted))
    for wants in met.values():
        if sum(wanted for _, wanted in wants) > 1.0:
            given = shares([wanted for _, wanted in wants], [1.0] * len(wants))
            for (job, wanted), got in zip(wants, given, strict=True):
                rates[job] = min(rates[job], got / wanted)
    return rates


def _beside(demands: Sequence[float], weights: Sequence[float], packets: Packets) -> list[float]:
    """Shares of collectives of one resource of a core, and what compute is left with."""
    return shares([*demands, 1.0], [*weights, float(packets.compute_bytes)])
