"""What collectives in flight and compute leave each other: DMA engines, HBM, links, EFA devices.

A DMA engine serves its rings in turn and changes ring at the end of a packet, so that rings that
all want more than there is get bandwidth in proportion to their packets (documented: compute and
communication overlap page); links and EFA devices are shared evenly (our choice, no page says).
What a ring does not want goes to the others: code claims what it takes on average, nothing while it
waits. Cores that share an HBM bank have even parts of it, and what others do not want; collectives
and compute of a core share its part as they share its DMA engines, where their bytes pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardwright.compiler.support.fields import made, plain

COMPUTE_PACKET_BYTES = 4096  # documented: default of NEURON_RT_DBG_DMA_PACKETIZATION_SIZE
COLLECTIVE_PACKET_BYTES = 65536  # documented: default and most of NEURON_RT_DBG_CC_DMA_PACKET_SIZE


@dataclass(frozen=True, slots=True)
class Demand:
    """Shares of a core's DMA engines, of the links and EFA devices of an instance (by number, where
    it takes most) and of the core's even part of an HBM bank that a collective, or code on average,
    takes when it runs alone."""

    dma: float
    wires: tuple[tuple[int, float], ...] = ()
    hbm: float = 0.0


@dataclass(frozen=True, slots=True)
class Packets:
    """Bytes per DMA packet: of compute, and of each collective stream (the last one serves the
    streams behind it)."""

    compute_bytes: int = COMPUTE_PACKET_BYTES
    stream_bytes: tuple[int, ...] = (COLLECTIVE_PACKET_BYTES,)

    def as_dict(self) -> dict[str, object]:
        """Plain data, as manifests and reports hold it."""
        found: dict[str, object] = plain(self)
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Packets:
        """Inverse of `as_dict`; what is not there has its default."""
        found: Packets = made(cls, data)
        return found

    def of(self, stream: int) -> int:
        """The packet of a stream."""
        return self.stream_bytes[min(stream, len(self.stream_bytes) - 1)]


DEFAULT_PACKETS = Packets()
NO_DEMAND = Demand(0.0)


def shares(demands: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Weighted max-min fair shares of one resource: nobody gets more than it wants, and who gets
    less has as much per weight as anybody."""
    given = list(demands)
    left, weight = 1.0, float(sum(weights))
    order = sorted(range(len(demands)), key=lambda i: demands[i] / weights[i])
    for i in order:
        given[i] = min(demands[i], left * weights[i] / weight)
        left -= given[i]
        weight -= weights[i]
    return given


def even_shares(demands: Sequence[float]) -> list[float]:
    """The same where all count alike."""
    return shares(demands, [1.0] * len(demands))


def bank_shares(wanted: Sequence[float], parts: int) -> list[float]:
    """What each core gets of an HBM bank of so many even parts; `wanted` likewise. Cores are served
    evenly (inferred: no page says)."""
    return [parts * got for got in even_shares([w / parts for w in wanted])]


@dataclass(frozen=True, slots=True)
class Bank:
    """What a core may have of its HBM bank, in even parts: all its rings on average, and its code
    for itself, whose bursts coincide with those of code beside it."""

    rings: float = 1.0
    code: float = 1.0


EVEN_PART = Bank()


@lru_cache(maxsize=16384)
def bank_beside(parts: int, mates: tuple[tuple[float, float], ...]) -> Bank:
    """What a core may have of a bank of so many parts beside others, of which each wants so much on
    average and as their code claims it."""
    rings, code = (
        bank_shares([float(parts), *sorted(wanted)], parts)[0]
        for wanted in ([average for average, _ in mates], [claim for _, claim in mates])
    )
    return Bank(rings, code)


@lru_cache(maxsize=16384)
def core_rates(
    jobs: tuple[tuple[Demand, int], ...],
    packets: Packets,
    code: Demand = NO_DEMAND,
    bank: Bank = EVEN_PART,
) -> tuple[tuple[float, ...], float, float]:
    """Speed of each collective in flight on a core, 1 when undisturbed; the share of the DMA
    engines that its code has, and its HBM bandwidth in even parts. `jobs` are demands with streams;
    code takes what is left, and in a fight what it wants as far as it is its turn."""
    weights = [*(float(packets.of(stream)) for _, stream in jobs), float(packets.compute_bytes)]
    dma = [*(demand.dma for demand, _ in jobs), code.dma]
    memory = [*(demand.hbm / bank.rings for demand, _ in jobs), code.hbm / bank.rings]
    shared = [(shares(wanted, weights), wanted) for wanted in (dma, memory)]
    rates = tuple(
        min((got[n] / wanted[n] for got, wanted in shared if wanted[n] > 0), default=1.0)
        for n in range(len(jobs))
    )
    rates = tuple(map(min, rates, _wire_rates([demand for demand, _ in jobs])))
    # What is slow for want of one resource takes less of the others.
    engines = 1.0 - sum(demand.dma * rate for (demand, _), rate in zip(jobs, rates, strict=True))
    taken = sum(demand.hbm * rate for (demand, _), rate in zip(jobs, rates, strict=True))
    (own_dma, _), (own_hbm, _) = shared
    return rates, max(engines, own_dma[-1]), max(bank.code - taken, own_hbm[-1] * bank.rings)


def _wire_rates(demands: Sequence[Demand]) -> list[float]:
    """Speed of each collective when those that meet on a link or device share it evenly."""
    rates = [1.0] * len(demands)
    met: dict[int, list[tuple[int, float]]] = {}
    for job, demand in enumerate(demands):
        for wire, wanted in demand.wires:
            met.setdefault(wire, []).append((job, wanted))
    for wants in met.values():
        if sum(wanted for _, wanted in wants) > 1.0:
            given = even_shares([wanted for _, wanted in wants])
            for (job, wanted), got in zip(wants, given, strict=True):
                rates[job] = min(rates[job], got / wanted)
    return rates
