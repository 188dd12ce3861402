"""What a run credits the machine with, worked out by hand: profiles, calibration, costs of
collectives, and shares of what is contended for.

Sources: the DMA bandwidth guide and overview (17 GB/s sustained, 27.2 in theory, 1300 ns per
transfer, half rate when reducing), the pages on collectives inside and across instances (1 to 2 us
per hop; 15 us on trn2), the page on overlap (packets of 4 and 64 KiB). The three fitted constants
are in sim_cluster/calibration.toml; docs/calibration.md has how they came about.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.collectives.costs import CollectiveCosts
from shardwright.compiler.machine.target import load_target, logical
from shardwright.compiler.timing.evaluate import Segment
from shardwright.sim_cluster.calibration import constants
from shardwright.sim_cluster.network.collective_costs import collective_costs
from shardwright.sim_cluster.profiles import PROFILES, Profile, credited, under_profile
from shardwright.sim_cluster.timing.contention import (
    DEFAULT_PACKETS,
    Bank,
    Demand,
    Packets,
    bank_beside,
    bank_shares,
    core_rates,
    shares,
)
from shardwright.sim_cluster.timing.macro import Stretch

TRN1N, TRN2 = load_target("trn1n.32xlarge"), logical(load_target("trn2.48xlarge"), 2)


def test_the_fitted_constants() -> None:
    """Value, and its band from the conservative to the peak profile."""
    found = {name: (fitted.value, fitted.band) for name, fitted in constants().items()}
    assert found == {
        "collective_touch": (0.308, (0.262, 1.0)),
        "streaming": (0.912, (0.815, 1.0)),
        "stall_recovery": (1.0, (0.0, 1.0)),
    }


def test_profiles() -> None:
    """27.2 / 17 = 1.6 is what theory credits a DMA engine with beyond what it sustains."""
    assert list(PROFILES.items()) == [
        ("conservative", Profile(name="conservative", streaming=0.815, stall_recovery=0.0)),
        ("nominal", Profile(name="nominal", streaming=0.912, stall_recovery=1.0)),
        ("peak", Profile(name="peak", streaming=1.0, stall_recovery=1.0, dma=1.6)),
    ]


@pytest.mark.parametrize(
    ("profile", "vector", "scalar", "dma", "recovery"),
    [
        # 1.12 GHz * 0.815, 1.4 GHz * 0.815, 17 GB/s * 0.815
        ("conservative", 912_800_000, 1_141_000_000, 13.855e9, 0.0),
        ("nominal", 1_021_440_000, 1_276_800_000, 15.504e9, 1.0),
        ("peak", 1_120_000_000, 1_400_000_000, 27.2e9, 1.0),
    ],
)
def test_what_a_profile_changes_of_a_core(
    profile: str, vector: int, scalar: int, dma: float, recovery: float
) -> None:
    """Clocks but for that of the tensor engine, the rate of DMA, stalls; nothing else."""
    seen = under_profile(TRN1N, profile)
    clocks = {"tensor": 2_800_000_000, "vector": vector, "scalar": scalar, "gpsimd": scalar}
    assert seen.core.clock_hz == clocks
    assert seen.core.dma_engine_bytes_per_s == pytest.approx(dma, rel=1e-12)
    assert seen.core.stall_recovery == recovery
    back = replace(
        seen.core,
        clock_hz=TRN1N.core.clock_hz,
        dma_engine_bytes_per_s=17e9,
        stall_recovery=0.0,
    )
    assert replace(seen, core=back) == TRN1N


def test_clocks_are_whole() -> None:
    """1.12 GHz * 0.7777777773 = 871,111,110.6 Hz."""
    credit = Profile(name="x", streaming=0.7777777773, stall_recovery=0.0)
    assert credited(TRN1N, credit).core.clock_hz["vector"] == 871_111_111


def test_costs_of_collectives_on_trn1n() -> None:
    """16 engines of 17 GB/s are 272 GB/s. A rank reaches a share of 0.308: it copies 272 * 0.308 =
    83.776 GB/s with two touches per byte, and reduces with three: 2 / 3 of that. A hop is one
    transfer of 1300 ns and a semaphore of 100 ns."""
    assert collective_costs(TRN1N, "nominal") == CollectiveCosts(
        profile="nominal",
        launch_ps=700_000,
        intra_hop_ps=1_400_000,
        inter_hop_ps=18_000_000,
        rank_copy_bytes_per_s=83_776_000_000,
        rank_reduce_bytes_per_s=55_850_666_667,
        rank_hbm_bytes_per_s=410_000_000_000,
        efa_efficiency=0.625,
        mesh="flat",
        mesh_max_bytes=1_048_576,
        rdh_max_bytes=0,
        kangaring=False,
        flat_ring_min_bytes=67_108_864,
        inter_recursive=True,
        inter_mesh_max_instances=4,
    )


def test_the_band_of_costs_of_collectives() -> None:
    """conservative: 272 * 0.262 = 71.264 GB/s, 12 us of launch, 0.55 of EFA. peak: all of 272,
    half of it when reducing, hops of 1 and 15 us, 0.70 of EFA."""
    low, high = collective_costs(TRN1N, "conservative"), collective_costs(TRN1N, "peak")
    assert (low.launch_ps, low.intra_hop_ps, low.inter_hop_ps) == (
        12_000_000,
        1_400_000,
        18_000_000,
    )
    assert (low.rank_copy_bytes_per_s, low.rank_reduce_bytes_per_s, low.efa_efficiency) == (
        71_264_000_000,
        47_509_333_333,
        0.55,
    )
    assert (high.launch_ps, high.intra_hop_ps, high.inter_hop_ps) == (
        700_000,
        1_000_000,
        15_000_000,
    )
    assert (high.rank_copy_bytes_per_s, high.rank_reduce_bytes_per_s, high.efa_efficiency) == (
        272_000_000_000,
        136_000_000_000,
        0.70,
    )
    near = replace(TRN1N, collectives=replace(TRN1N.collectives, efa_hop_ps=9_000_000))
    assert collective_costs(near, "peak").inter_hop_ps == 9_000_000


def test_a_logical_core_of_two_moves_with_the_engines_of_both() -> None:
    """2 * 16 * 23 GB/s = 736; * 0.308 = 226.688 GB/s to copy, 2 / 3 of it to reduce; 2 * 362.5 GB/s
    of HBM; EFA hops of 15 us."""
    found = collective_costs(TRN2, "nominal", efa_efficiency=0.5)
    assert found.rank_copy_bytes_per_s == 226_688_000_000
    assert found.rank_reduce_bytes_per_s == 151_125_333_333
    assert found.rank_hbm_bytes_per_s == 725_000_000_000
    assert (found.inter_hop_ps, found.mesh, found.rdh_max_bytes) == (
        15_000_000,
        "grouped",
        58_720_256,
    )
    assert found.efa_efficiency == 0.5 and found.kangaring


# Shares of one resource.


def test_shares_by_weight() -> None:
    """Two that want all, weights 16 and 1: 16/17 and 1/17. One that wants little leaves the rest:
    0.2, then 0.8 by 3 : 1. All fit: everybody has what it wants."""
    assert shares([1.0, 1.0], [65536, 4096]) == pytest.approx([16 / 17, 1 / 17])
    assert shares([0.2, 1.0, 1.0], [1, 3, 1]) == pytest.approx([0.2, 0.6, 0.2])
    assert shares([0.5, 0.3], [1, 100]) == [0.5, 0.3]
    # By want per weight: 0.6 / 3 = 0.2 before 0.3 / 1; 0.6 fits into 3/4, 0.3 into the rest of 0.4
    assert shares([0.6, 0.3], [3, 1]) == pytest.approx([0.6, 0.3])
    assert shares([0.6, 0.9], [1, 1]) == pytest.approx([0.5, 0.5])


def test_even_parts_of_a_bank() -> None:
    """A bank of two parts: one core wants 0.5 of a part, the other all: 1.5 are left for it."""
    assert bank_shares([0.5, 2.0], 2) == pytest.approx([0.5, 1.5])
    assert bank_shares([2.0, 2.0], 2) == pytest.approx([1.0, 1.0])
    assert bank_shares([4.0, 1.0, 0.25, 4.0], 4) == pytest.approx([1.375, 1.0, 0.25, 1.375])
    beside = bank_beside(2, ((0.5, 2.0),))
    assert beside.rings == pytest.approx(1.5) and beside.code == pytest.approx(1.0)
    alone = bank_beside(2, ((0.0, 0.0),))
    assert (alone.rings, alone.code) == (2.0, 2.0)


def test_packets_have_documented_sizes() -> None:
    """4 KiB of compute, 64 KiB of collectives; the last packet serves streams behind it."""
    assert Packets() == DEFAULT_PACKETS == Packets(4096, (65536,))
    of_three = Packets(4096, (65536, 8192))
    assert [of_three.of(stream) for stream in range(4)] == [65536, 8192, 8192, 8192]
    assert Packets.from_dict({}) == DEFAULT_PACKETS
    assert Packets.from_dict(of_three.as_dict()) == of_three


def test_what_code_and_a_collective_leave_each_other() -> None:
    """A collective that wants 0.6 of the engines and code that wants all: 16/17 of the turns would
    be more than 0.6, so it runs undisturbed, and code has 0.4 of the engines, all of HBM."""
    job = (Demand(0.6), 0)
    assert core_rates((job,), DEFAULT_PACKETS, Demand(1.0)) == ((1.0,), pytest.approx(0.4), 1.0)
    # With packets of 4 KiB both: 0.5 each; the collective is 0.5 / 0.6 as fast.
    even = Packets(4096, (4096,))
    (rate,), engines, memory = core_rates((job,), even, Demand(1.0))
    assert (rate, engines, memory) == (pytest.approx(0.5 / 0.6), pytest.approx(0.5), 1.0)


def test_hbm_is_shared_as_the_engines_are() -> None:
    """The collective wants 0.8 of the core's part of HBM, code all of it, packets 1 : 1: half each.
    It is 0.5 / 0.8 as fast, so of the engines it takes 0.3 * 0.625 and leaves the rest."""
    even = Packets(4096, (4096,))
    (rate,), engines, memory = core_rates(((Demand(0.3, hbm=0.8), 0),), even, Demand(0.2, hbm=1.0))
    assert (rate, engines, memory) == (0.625, pytest.approx(0.8125), pytest.approx(0.5))


def test_half_a_bank_slows_a_collective_down_that_wants_it_all() -> None:
    """Of a bank that gives its rings 0.5 and its code 0.75, a collective that wants 0.8 has 0.5,
    0.625 as fast; code has 0.75 less 0.5."""
    (rate,), engines, memory = core_rates(
        ((Demand(0.4, hbm=0.8), 0),), DEFAULT_PACKETS, Demand(0.0), Bank(0.5, 0.75)
    )
    assert (rate, engines, memory) == (0.625, pytest.approx(0.75), pytest.approx(0.25))


def test_wires_are_shared_evenly() -> None:
    """Two on one link that want 0.5 and 0.9 of it: 0.5 each; the second is 0.5 / 0.9 as fast. Where
    they want 0.4 and 0.6, both have it."""
    jobs = ((Demand(0.1, wires=((3, 0.5),)), 0), (Demand(0.1, wires=((3, 0.9), (4, 1.0))), 1))
    rates, _, _ = core_rates(jobs, DEFAULT_PACKETS)
    assert rates == (1.0, pytest.approx(0.5 / 0.9))
    fits = ((Demand(0.1, wires=((3, 0.4),)), 0), (Demand(0.1, wires=((3, 0.6),)), 1))
    assert core_rates(fits, DEFAULT_PACKETS)[0] == (1.0, 1.0)
    near = ((Demand(0.0, wires=((3, 0.5),)), 0), (Demand(0.0, wires=((3, 0.55),)), 1))
    assert core_rates(near, DEFAULT_PACKETS)[0] == (1.0, pytest.approx(0.5 / 0.55))
    # Two that meet on two links are as slow as on the scarcer one, wherever it comes.
    both = ((3, 0.9), (4, 0.6))
    for wires in (both, both[::-1]):
        twice = ((Demand(0.0, wires=wires), 0), (Demand(0.0, wires=wires), 1))
        assert core_rates(twice, DEFAULT_PACKETS)[0] == pytest.approx((0.5 / 0.9,) * 2)


def test_who_is_alone_has_everything() -> None:
    assert core_rates(((Demand(1.0, hbm=1.0), 0),), DEFAULT_PACKETS) == ((1.0,), 0.0, 0.0)
    assert core_rates((), DEFAULT_PACKETS) == ((), 1.0, 1.0)


def test_code_has_its_turn_of_the_rings_part_of_a_bank() -> None:
    """1.5 parts for all rings, one that code claims. A collective that wants 1.2 and code that
    wants 0.6, packets 1 : 1: of 1.5, 0.6 and 0.9, so it is 0.75 as fast; 1 - 0.9 would be less than
    code's turn of 0.6."""
    even = Packets(4096, (4096,))
    (rate,), _, memory = core_rates(
        ((Demand(0.1, hbm=1.2), 0),), even, Demand(0.0, hbm=0.6), Bank(1.5, 1.0)
    )
    assert (rate, memory) == (pytest.approx(0.75), pytest.approx(0.6))


# How long a stretch of code takes at a share of the engines and of HBM.


def stretch(full: int, half: int, bank: int = 0, scarce: int = 0, cores: int = 1) -> Stretch:
    segment = Segment("compute", full)
    return Stretch(full, half, 0, segment, "f", bank_ps=bank, scarce_ps=scarce, bank_cores=cores)


@pytest.mark.parametrize(
    ("dma", "wanted"),
    # 1000 ps, 1600 at half: speed falls from 1 to 0.625, 0.75 per whole share; at 0.75 it is 0.8125
    [(1.0, 1000), (0.5, 1600), (0.75, 1000 / 0.8125), (0.2, 1000 / 0.4), (0.01, 1000 / 0.2575)],
)
def test_code_with_fewer_engines(dma: float, wanted: float) -> None:
    assert stretch(1000, 1600).duration_ps(dma) == pytest.approx(wanted)


def test_code_bound_by_transfers_alone_takes_as_many_times_as_long() -> None:
    """1000 and 2000 at half: speed is the share; one that takes more than twice as long, too. One
    picosecond, and none, is the same at any share where half makes no difference."""
    assert (stretch(1, 1).duration_ps(0.5), stretch(0, 0).duration_ps(0.5)) == (1, 0)
    for half in (2000, 2400):
        assert stretch(1000, half).duration_ps(0.25) == pytest.approx(4000)
    assert stretch(1000, 900).duration_ps(0.25) == pytest.approx(1000)


@pytest.mark.parametrize(
    ("hbm", "wanted"),
    # 1000 at an even part, 1600 at half of it, 800 with the bank of two: between one and two parts
    # speed goes from 1 to 1.25; nothing beyond the bank
    [(1.0, 1000), (0.5, 1600), (0.75, 1000 / 0.8125), (1.5, 1000 / 1.125), (2.0, 800), (3.0, 800)],
)
def test_code_with_more_or_less_memory(hbm: float, wanted: float) -> None:
    code = stretch(1000, 0, bank=800, scarce=1600, cores=2)
    assert code.duration_ps(1.0, hbm) == pytest.approx(wanted)


def test_code_of_a_core_with_a_bank_of_its_own() -> None:
    """It has all of the bank as soon as it has more than an even part."""
    alone = Stretch(1000, 0, 0, Segment("compute", 1000), "f", bank_ps=800)
    assert alone.duration_ps(1.0, 1.5) == 800


def test_what_is_scarcer_decides() -> None:
    """At 0.5 of the engines 1500 ps, at half of HBM 1600."""
    code = stretch(1000, 1500, bank=800, scarce=1600, cores=2)
    assert code.duration_ps(0.5, 1.0) == pytest.approx(1500)
    assert code.duration_ps(0.5, 0.5) == pytest.approx(1600)
    assert code.duration_ps(0.5, 2.0) == pytest.approx(1500)
    assert code.duration_ps(1.0) == 1000
    assert Stretch(1000, 1600, 0, Segment("compute", 1000), "f").duration_ps(1.0, 0.5) == 1000
    four = stretch(1000, 0, bank=800, scarce=0, cores=4)
    assert four.duration_ps(1.0, 2.5) == pytest.approx(1000 / 1.125)  # half way from 1 to 4


def test_code_that_takes_no_time_takes_none_at_any_share() -> None:
    empty = Stretch(0, 0, 0, Segment("compute", 0), "f")
    assert [empty.duration_ps(1.0, share) for share in (0.5, 1.0, 2.0)] == [0, 0, 0]
