"""DMA packet sizes as a job gives them: one for compute, a list for the collective streams."""

from __future__ import annotations

from shardwright.compiler.diagnostics import UsageError
from shardwright.sharding.settings import StrategySettings
from shardwright.sim_cluster.timing.contention import (
    COLLECTIVE_PACKET_BYTES,
    COMPUTE_PACKET_BYTES,
    Packets,
)


def packets_of(settings: StrategySettings) -> Packets:
    """Packets of a run.

    Raises UsageError for sizes outside of what the runtime takes: compute packets only grow,
    those of collectives only shrink (documented: compute and communication overlap page).
    """
    words = [word.strip() for word in settings.collective_packet_bytes.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise _refused("comma-separated bytes", settings.collective_packet_bytes)
    sizes = tuple(map(int, words)) or (COLLECTIVE_PACKET_BYTES,)
    if not all(COMPUTE_PACKET_BYTES <= size <= COLLECTIVE_PACKET_BYTES for size in sizes):
        allowed = f"sizes from {COMPUTE_PACKET_BYTES} to {COLLECTIVE_PACKET_BYTES}"
        raise _refused(allowed, settings.collective_packet_bytes)
    if len(sizes) > settings.cc_streams:
        allowed = f"at most {settings.cc_streams} sizes (strategy.cc_streams)"
        raise _refused(allowed, settings.collective_packet_bytes)
    return Packets(settings.compute_packet_bytes, sizes)


def _refused(required: str, given: str) -> UsageError:
    return UsageError(
        "SW_USAGE",
        f"strategy.collective_packet_bytes requires {required}, got {given!r}",
        None,
        "give one size per stream, for example 65536,4096 with strategy.cc_streams=2",
    )
