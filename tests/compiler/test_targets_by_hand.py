"""Every figure of every machine as its page prints it, and what the program makes of it in bytes,
hertz and picoseconds, worked out by hand.

Sources: T1, T2, T3 and F1, F2 are the architecture pages of trn1, trn2, trn3, inf1 and inf2, K1, K2
and K3 those of their NeuronCores for kernel authors; DB the DMA bandwidth guide, DO the DMA
overview, DRV the driver, LN the page on logical NeuronCores, DM the page on device memory, MEM the
overview of the memory hierarchy, VAN a public price list of 2025-11-30. Full names are in the data
files.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, TypeVar

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import altered, load_target, logical, target_names

Row = TypeVar("Row")

# One physical core. Everything a core of another generation has alike stands here: 1300 ns per
# transfer (DB), 64 KiB per descriptor (udma.h), one DMA engine per 8 partitions (DO), 60 cycles to
# reach SBUF (K1), half rate over 16 bytes (K1).
# Defaults where no page says: 100 ns for a semaphore, 100 us for a program, two cores per HBM bank;
# 2400 and 140 bytes fit the chart of DO.
ALIKE: dict[str, Any] = {
    "dma_fixed_ps": 1_300_000,
    "dma_descriptor_min_bytes": 2400,
    "dma_descriptor_extra_bytes": 140,
    "dma_descriptor_max_bytes": 65_536,
    "dma_partitions_per_engine": 8,
    "compute_latency_cycles": 60,
    "wide_stride_factor": 2.0,
    "semaphore_ps": 100_000,
    "program_start_ps": 100_000_000,
    "hbm_bank_cores": 2,
    "stall_recovery": 0.0,
    "compiler": "neuronx-cc",
    "refused_types": (),
    "refused_io_types": (),
}
CORES: dict[str, dict[str, Any]] = {
    # F1: 1 GHz gives the printed rate; 3 engines of 5 GB/s (DRV)
    "inf1.xlarge": {
        "name": "NeuronCore-v1",
        "generation": "v1",
        "compiler": "neuron-cc",
        # CC1RN: no INT8, and no FP64 or INT64 inputs and outputs; DT: no fp8 before v2
        "refused_types": ["i8", "ui8", "f8E4M3", "f8E4M3FN", "f8E5M2"],
        "refused_io_types": ["f64", "i64", "ui64"],
        "clock_hz": {"tensor": 10**9, "vector": 10**9, "scalar": 10**9, "gpsimd": 0},
        "dma_engines": 3,
        "dma_engine_bytes_per_s": 5_000_000_000.0,
        "peak_bf16_flops_per_s": 16e12,
    },
    # K1: 2.8, 1.12, 1.4, 1.4 GHz, 16 engines of 17 GB/s (DB);
    # 2 * 128 * 128 * 2.8e9 = 91.75e12
    "trn1n.32xlarge": {
        "name": "NeuronCore-v2",
        "generation": "v2",
        "clock_hz": {
            "tensor": 2_800_000_000,
            "vector": 1_120_000_000,
            "scalar": 1_400_000_000,
            "gpsimd": 1_400_000_000,
        },
        "dma_engines": 16,
        "dma_engine_bytes_per_s": 17_000_000_000.0,
        "peak_bf16_flops_per_s": 91.75e12,
    },
    # K2: 2.4, 0.96, 1.2, 1.2 GHz, 23 GB/s (DB), 79 TFLOPS
    "trn2.48xlarge": {
        "name": "NeuronCore-v3",
        "generation": "v3",
        "clock_hz": {
            "tensor": 2_400_000_000,
            "vector": 960_000_000,
            "scalar": 1_200_000_000,
            "gpsimd": 1_200_000_000,
        },
        "dma_engines": 16,
        "dma_engine_bytes_per_s": 23_000_000_000.0,
        "peak_bf16_flops_per_s": 79e12,
    },
    # K3: 2.4, 1.2, 1.2, 1.2 GHz, 33 GB/s (DB), 79 TFLOPS
    "trn3-gen1-ultraserver": {
        "name": "NeuronCore-v4",
        "generation": "v4",
        "clock_hz": {
            "tensor": 2_400_000_000,
            "vector": 1_200_000_000,
            "scalar": 1_200_000_000,
            "gpsimd": 1_200_000_000,
        },
        "dma_engines": 16,
        "dma_engine_bytes_per_s": 33_000_000_000.0,
        "peak_bf16_flops_per_s": 79e12,
    },
}
FAMILIES = {
    "inf1": "inf1.xlarge",
    "inf2": "trn1n.32xlarge",
    "trn1": "trn1n.32xlarge",
    "trn1n": "trn1n.32xlarge",
    "trn2": "trn2.48xlarge",
    "trn3": "trn3-gen1-ultraserver",
}


def family(name: str) -> str:
    return name.partition(".")[0].partition("-")[0]


def by_hand(key: str, table: dict[str, Row], title: str) -> Row:
    """The row of a machine or a family in a table of this file."""
    assert key in table, f"{key} requires a row in {title}, worked out by hand from its page"
    return table[key]


@pytest.mark.parametrize("name", target_names())
def test_the_core_of_every_machine(name: str) -> None:
    core = asdict(load_target(name).core)
    del core["limits"]  # tests/compiler/isa/test_limits_by_hand.py
    assert core == ALIKE | CORES[by_hand(family(name), FAMILIES, "FAMILIES")]


# What collectives cost besides links (docs/network.md): 0.7 us to launch one and per link, 18 us
# per EFA hop on trn1 and 15 us on trn2 (documented); a mesh up to 1 MiB; recursive doubling up to
# 56 MiB = 58,720,256 B and KangaRing on trn2 (intra-node page); flat rings from 64 MiB =
# 67,108,864 B on trn1 alone.
LAUNCH: dict[str, Any] = {"launch_ps": 700_000, "wire_ps": 700_000}
OF_TRN1: dict[str, Any] = LAUNCH | {
    "efa_hop_ps": 18_000_000,
    "mesh": "flat",
    "mesh_max_bytes": 1_048_576,
    "rdh_max_bytes": 0,
    "kangaring": False,
    "flat_ring_min_bytes": 67_108_864,
}
OF_TRN2: dict[str, Any] = LAUNCH | {
    "efa_hop_ps": 15_000_000,
    "mesh": "grouped",
    "mesh_max_bytes": 1_048_576,
    "rdh_max_bytes": 58_720_256,
    "kangaring": True,
    "flat_ring_min_bytes": 0,
}
OF_INF1 = OF_TRN1 | {"mesh_max_bytes": 0, "flat_ring_min_bytes": 0}
COLLECTIVES = {"inf1": OF_INF1, "trn2": OF_TRN2, "trn3": OF_TRN2}


@pytest.mark.parametrize("name", target_names())
def test_what_collectives_of_every_machine_cost(name: str) -> None:
    found = asdict(load_target(name).collectives)
    wanted = COLLECTIVES.get(family(name), OF_TRN1)
    assert found == wanted, f"{family(name)} has a row in COLLECTIVES, unless it is as trn1"


# Per physical core: chip memory in bytes, bandwidth and published bf16 rate over the cores of a
# chip. 8 GiB / 4, 50 / 4, 64 / 4 (F1); 32 GiB / 2, 820 / 2, 190 / 2 (T1, K1); 96 GiB / 8, 2900 / 8,
# 667 / 8 (T2); 144 GiB / 8, 4900 / 8, 671 / 8 (T3).
PER_CORE: dict[str, tuple[int, int, float, float]] = {
    "inf1": (4, 2_147_483_648, 12.5e9, 16e12),
    "inf2": (2, 17_179_869_184, 410e9, 95e12),
    "trn1": (2, 17_179_869_184, 410e9, 95e12),
    "trn1n": (2, 17_179_869_184, 410e9, 95e12),
    "trn2": (8, 12_884_901_888, 362.5e9, 83.375e12),
    "trn3": (8, 19_327_352_832, 612.5e9, 83.875e12),
}


@pytest.mark.parametrize("name", target_names())
def test_memory_and_rates_of_a_physical_core(name: str) -> None:
    target = load_target(name)
    found = (
        target.cores_per_chip,
        target.hbm_bytes_per_core,
        target.hbm_bytes_per_s_per_core,
        target.published_flops_per_s_per_core,
    )
    assert found == by_hand(family(name), PER_CORE, "PER_CORE")
    # DM: 96 MB of code per physical core; one scratchpad page of 64 MB for DMA rings (default).
    assert target.reserve_bytes_per_core == 160_000_000
    assert target.limit_bytes == PER_CORE[family(name)][1] - 160_000_000


# Topology, chips along its sides, GB/s per link and direction, EFA Gbps and devices, USD per hour.
Around = tuple[str, tuple[int, ...], tuple[float, ...], float, int, float | None]
AROUND: dict[str, Around] = {
    "inf1.xlarge": ("none", (1,), (0.0,), 0, 0, 0.228),
    "inf1.2xlarge": ("none", (1,), (0.0,), 0, 0, 0.362),
    "inf1.6xlarge": ("ring", (4,), (8.0,), 0, 0, 1.18),  # F1: 32 GB/s over two links, both ways
    "inf1.24xlarge": ("ring", (16,), (8.0,), 0, 0, 4.721),
    "inf2.xlarge": ("none", (1,), (0.0,), 0, 0, 0.7582),
    "inf2.8xlarge": ("none", (1,), (0.0,), 0, 0, 1.96786),
    "inf2.24xlarge": ("line", (6,), (48.0,), 0, 0, 6.49063),  # F2: 192 over two links, both ways
    "inf2.48xlarge": ("ring", (12,), (48.0,), 0, 0, 12.98127),
    "trn1.2xlarge": ("none", (1,), (0.0,), 0, 0, 1.34375),
    "trn1.32xlarge": ("torus", (4, 4), (48.0, 48.0), 800, 8, 21.5),  # T1: 384 / 4 / 2
    "trn1n.32xlarge": ("torus", (4, 4), (96.0, 96.0), 1600, 16, 24.78),  # T1: 768 / 4 / 2
    "trn2.48xlarge": ("torus", (4, 4), (128.0, 128.0), 3200, 16, None),  # T2: 1024 / 4 / 2
    # T2: 256 / 2 / 2 along the third side; four instances in EFA
    "trn2-ultraserver": ("torus", (4, 4, 4), (64.0, 128.0, 128.0), 12_800, 64, None),
    "trn3-gen1-ultraserver": ("switch", (16, 64), (256.0, 320.0), 12_800, 64, None),  # T3
    "trn3-gen2-ultraserver": ("switch", (4, 72, 144), (256.0, 320.0, 128.0), 28_800, 144, None),
}
IN_BLOCKS = {"trn1.32xlarge": 9.532, "trn2.48xlarge": 35.7608, "trn2-ultraserver": 143.0432}
"""USD per hour in a Capacity Block (CB); an ultraserver is four instances."""
CHIPS = {
    "inf1.6xlarge": 4,
    "inf1.24xlarge": 16,
    "inf2.24xlarge": 6,
    "inf2.48xlarge": 12,
    "trn1.32xlarge": 16,
    "trn1n.32xlarge": 16,
    "trn2.48xlarge": 16,
    "trn2-ultraserver": 64,
    "trn3-gen1-ultraserver": 64,
    "trn3-gen2-ultraserver": 144,
}


@pytest.mark.parametrize("name", target_names())
def test_what_is_around_the_chips_of_every_machine(name: str) -> None:
    target = load_target(name)
    topology, shape, links, efa_gbps, devices, price = by_hand(name, AROUND, "AROUND")
    assert (target.topology, target.shape) == (topology, shape)
    assert target.link_bytes_per_s == tuple(gb * 1_000_000_000 for gb in links)
    assert target.efa_bytes_per_s == efa_gbps * 125_000_000  # a byte has 8 bits
    assert target.efa_devices == devices
    prices = {"on-demand": price, "capacity-block": IN_BLOCKS.get(name)}
    wanted = {kind: usd for kind, usd in prices.items() if usd is not None}
    assert {kind: fact.value for kind, fact in target.prices.items()} == wanted
    assert target.chips == CHIPS.get(name, 1), f"{name} has a row in CHIPS, unless it has one chip"
    assert target.cores == CHIPS.get(name, 1) * PER_CORE[family(name)][0]


# GiB of the host's memory (F1, F2, T1, T2, T3; an ultraserver of trn2 is four instances), and GB/s
# of a chip's link to it, each way: about 16 on trn1 and trn2 (MEM), not known of others.
HOSTS: dict[str, tuple[int, int]] = {
    "inf1.xlarge": (8, 0),
    "inf1.2xlarge": (16, 0),
    "inf1.6xlarge": (48, 0),
    "inf1.24xlarge": (192, 0),
    "inf2.xlarge": (16, 0),
    "inf2.8xlarge": (128, 0),
    "inf2.24xlarge": (384, 0),
    "inf2.48xlarge": (768, 0),
    "trn1.2xlarge": (32, 16),
    "trn1.32xlarge": (512, 16),
    "trn1n.32xlarge": (512, 16),
    "trn2.48xlarge": (2048, 16),
    "trn2-ultraserver": (8192, 16),
    "trn3-gen1-ultraserver": (8192, 0),
    "trn3-gen2-ultraserver": (27_648, 0),
}


@pytest.mark.parametrize("name", target_names())
def test_the_host_of_every_machine(name: str) -> None:
    target = load_target(name)
    gib, gb_per_s = by_hand(name, HOSTS, "HOSTS")
    assert target.host_link_bytes_per_s == gb_per_s * 1_000_000_000
    assert target.host_memory_bytes == gib * 2**30


def test_logical_cores_of_two_have_what_both_have() -> None:
    """LN: trn2 and trn3 group two cores unless asked for one. 2 * 12 GiB, 2 * 160 MB, 2 * 83.375
    TFLOPS; the bandwidth is that of each; both share one bank."""
    one, two = (logical(load_target("trn2.48xlarge"), lnc) for lnc in (1, 2))
    assert logical(load_target("trn2.48xlarge")) == two
    assert (one.cores, one.cores_per_chip, one.cores_per_bank, one.lnc) == (128, 8, 2, 1)
    assert (two.cores, two.cores_per_chip, two.cores_per_bank, two.lnc) == (64, 4, 1, 2)
    assert (one.hbm_bytes_per_core, two.hbm_bytes_per_core) == (12_884_901_888, 25_769_803_776)
    assert (one.limit_bytes, two.limit_bytes) == (12_724_901_888, 25_449_803_776)
    assert two.published_flops_per_s_per_core == 166.75e12
    assert two.hbm_bytes_per_s_per_core == one.hbm_bytes_per_s_per_core == 362.5e9
    assert not one.is_hypothetical and not two.is_hypothetical


def test_where_logical_cores_are_allowed() -> None:
    """LN and the page on EARG001: 1 alone on trn1 and inf2, 1 and 2 on trn2 and trn3."""
    for name in target_names():
        wanted = (1, 2) if family(name) in ("trn2", "trn3") else (1,)
        assert load_target(name).allowed_lnc == wanted, (
            f"families that may have two, with {name} or not, are named here"
        )
    first = load_target("trn1n.32xlarge")
    assert logical(first).lnc == 1
    with pytest.raises(UsageError, match="requires 1, got 2"):
        logical(first, 2)
    with pytest.raises(UsageError, match="requires 1 or 2, got 4"):
        logical(load_target("trn2.48xlarge"), 4)
    what_if = logical(first, 2, hypothetical=True)
    assert what_if.is_hypothetical and (what_if.cores, what_if.cores_per_bank) == (16, 1)
    assert what_if.hbm_bytes_per_core == 34_359_738_368  # 32 GiB
    odd = replace(load_target("trn2.48xlarge"), cores_per_chip=3)
    with pytest.raises(UsageError, match="got 2"):
        logical(odd, 2)


def test_a_what_if_changes_what_it_names_and_nothing_else() -> None:
    """10 % more HBM bandwidth on trn2: 3190 / 8; a logical core of two stays one."""
    target = logical(load_target("trn2.48xlarge"), 2)
    faster = altered(target, {"hbm_gb_per_s_per_chip": 3190})
    assert faster == replace(target, hbm_bytes_per_s_per_core=398.75e9)
    fine = altered(target, {"cross_engine_semaphore_ns": 0.25, "dma_fixed_ns": 0.5})
    assert (fine.core.semaphore_ps, fine.core.dma_fixed_ps) == (250, 500)


def test_times_and_clocks_are_whole_and_rounded() -> None:
    """2.01 us are 2,010,000 ps and 2.03 GHz 2,030,000,000 Hz: in floats, the products are less."""
    given = {
        "collective_launch_us": 2.01,
        "neuronlink_wire_us": 2.01,
        "efa_hop_us": 2.01,
        "dma_fixed_ns": 2.01,
        "cross_engine_semaphore_ns": 2.01,
        "program_start_us": 2.01,
        "tensor_clock_ghz": 2.03,
    }
    target = altered(load_target("trn1n.32xlarge"), given)
    core, facts = target.core, target.collectives
    found = (facts.launch_ps, facts.wire_ps, facts.efa_hop_ps, core.dma_fixed_ps)
    found += (core.semaphore_ps, core.program_start_ps, core.clock_hz["tensor"])
    assert found == (2_010_000, 2_010_000, 2_010_000, 2_010, 2_010, 2_010_000, 2_030_000_000)
    assert {type(number) for number in found} == {int}


def test_names_and_banks() -> None:
    """A bank has at least one core; names without data files take the machine of trn1n."""
    first = load_target("trn1n.32xlarge")
    alone = replace(first, core=replace(first.core, hbm_bank_cores=1))
    assert (first.cores_per_bank, alone.cores_per_bank) == (2, 1)
    assert logical(alone, 2, hypothetical=True).cores_per_bank == 1
    four = replace(first, core=replace(first.core, hbm_bank_cores=4))
    assert (four.cores_per_bank, logical(four, 2, hypothetical=True).cores_per_bank) == (4, 2)
    assert first.lnc == 1 and first.trains
    assert not load_target("inf1.xlarge").trains
    assert target_names() == sorted(AROUND), "AROUND requires a row for every machine"
