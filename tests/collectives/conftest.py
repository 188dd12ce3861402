"""Machines the collective tests run on; rates are the one-way defaults of trn1 and trn1n."""

from __future__ import annotations

import pytest

from shardwright.collectives.topology import Topology, torus


def trn1n(instances: int = 1) -> Topology:
    """16 chips of 2 ranks, 96 GB/s per directed link, 16 EFA devices with 200 GB/s in all."""
    return torus(
        4,
        4,
        ranks_per_chip=2,
        link_bytes_per_s=96 * 10**9,
        instances=instances,
        efa_bytes_per_s=200 * 10**9,
        efa_devices=16,
    )


def trn1(instances: int = 1) -> Topology:
    """16 chips of 2 ranks, 48 GB/s per directed link, 8 EFA devices with 100 GB/s in all."""
    return torus(
        4,
        4,
        ranks_per_chip=2,
        link_bytes_per_s=48 * 10**9,
        instances=instances,
        efa_bytes_per_s=100 * 10**9,
        efa_devices=8,
    )


@pytest.fixture(name="trn1n")
def trn1n_fixture():
    return trn1n


@pytest.fixture(name="trn1")
def trn1_fixture():
    return trn1
