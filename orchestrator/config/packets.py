"""DMA packet sizes as a job gives them: one for compute, a list for the collective streams."""

from __future__ import annotations

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.arguments import comma_words
from shardwright.sharding.settings import StrategySettings
from shardwright.sim_cluster.timing.contention import (
    COLLECTIVE_PACKET_BYTES,
    COMPUTE_PACKET_BYTES,
    Packets,
)


def packets_of(settings: StrategySettings) -> Packets:
    """Packets of a run. Raises UsageError for sizes outside of what the runtime takes: compute
    packets only grow, those of collectives only shrink (documented: compute and communication
    overlap page)."""
    given = settings.collective_packet_bytes
    words = comma_words(given)
    sizes: tuple[int, ...] = (COLLECTIVE_PACKET_BYTES,)
    is_read = all(word.isdecimal() for word in words)
    if words and is_read:
        sizes = tuple(map(int, words))
    if not is_read:
        required = "comma-separated bytes"
    elif not all(COMPUTE_PACKET_BYTES <= size <= COLLECTIVE_PACKET_BYTES for size in sizes):
        required = f"sizes from {COMPUTE_PACKET_BYTES} to {COLLECTIVE_PACKET_BYTES}"
    elif len(sizes) > settings.cc_streams:
        required = f"at most {settings.cc_streams} sizes (strategy.cc_streams)"
    else:
        return Packets(settings.compute_packet_bytes, sizes)
    raise UsageError(
        "SW_USAGE",
        f"strategy.collective_packet_bytes requires {required}, got {given!r}",
        hint="give one size per stream, for example 65536,4096 with strategy.cc_streams=2",
    )
