"""DMA packet sizes of a job."""

from __future__ import annotations

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.packets import packets_of
from shardwright.sharding.settings import StrategySettings
from shardwright.sim_cluster.timing.contention import DEFAULT_PACKETS, Packets


def test_packets_by_stream() -> None:
    assert packets_of(StrategySettings()) == DEFAULT_PACKETS
    found = packets_of(StrategySettings(collective_packet_bytes="65536, 4096", cc_streams=2))
    assert found == Packets(4096, (65536, 4096))
    assert [found.of(stream) for stream in range(3)] == [65536, 4096, 4096]


@pytest.mark.parametrize("given", ["131072", "65536,2048", "many", "65536;4096", "65536,4096"])
def test_packets_that_no_runtime_takes(given: str) -> None:
    with pytest.raises(UsageError, match="collective_packet_bytes requires"):
        packets_of(StrategySettings(collective_packet_bytes=given))


def test_packets_as_manifests_hold_them() -> None:
    for packets in (DEFAULT_PACKETS, Packets(8192, (65536, 4096))):
        assert Packets.from_dict(packets.as_dict()) == packets
    assert Packets.from_dict({}) == DEFAULT_PACKETS
