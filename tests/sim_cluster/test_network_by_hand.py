"""The network of machines, and what collectives of a program cost on it, worked out by hand.

Sources: the architecture pages (4x4 torus, chip id 4 * row + column, neighbours one row or column
away, modulo 4; one EFA device per chip on trn1n, one per two on trn1), the pages on collectives for
the formula, docs/network.md for what is inferred.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.placement import place_mesh
from shardwright.collectives.select import Choice, alternatives
from shardwright.collectives.timing.runtimes import runtime_named
from shardwright.collectives.topology import Tier, Topology, ring, torus
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import load_target, logical
from shardwright.sim_cluster.network.network import Network, larger_side_bytes
from shardwright.sim_cluster.timing.degraded import degraded, pattern_of

TRN1N = load_target("trn1n.32xlarge")
GB = 1_000_000_000


def links(topology: Topology) -> dict[tuple[int, int], int]:
    """GB/s of every directed link between chips, or of ports."""
    inside = ~topology.is_efa
    ends = zip(topology.link_source[inside], topology.link_target[inside], strict=True)
    rates = (topology.bytes_per_s[inside] // GB).tolist()
    return dict(zip(((int(a), int(b)) for a, b in ends), rates, strict=True))


def path(topology: Topology, a: int, b: int) -> list[int]:
    """Chips on the way from one to another."""
    numbers = [n for n in topology.routes[a, b].tolist() if n >= 0]
    return [a, *topology.link_target[numbers].tolist()]


def test_the_torus_of_trn1n() -> None:
    """Chip 5, row 1 and column 1, has 1 and 9, 4 and 6 beside it; chip 0 has 4 and 12, 1 and 3."""
    topology = cluster_topology(TRN1N, 1)
    found = links(topology)
    assert len(found) == 64 and set(found.values()) == {96}
    assert sorted(b for a, b in found if a == 5) == [1, 4, 6, 9]
    assert sorted(b for a, b in found if a == 0) == [1, 3, 4, 12]
    assert set(topology.latency_ps.tolist()) == {700_000}
    assert (topology.ranks_per_chip, topology.num_ranks) == (2, 32)
    assert not topology.is_efa.any()


def test_ways_go_along_the_row_first_and_half_way_round_upwards() -> None:
    """From 0 to 10, two rows and two columns on; from 0 to 3 the short way; from 1 to 15."""
    topology = cluster_topology(TRN1N, 1)
    assert path(topology, 0, 10) == [0, 1, 2, 6, 10]
    assert path(topology, 10, 0) == [10, 11, 8, 12, 0]
    assert path(topology, 0, 3) == [0, 3] and path(topology, 3, 0) == [3, 0]
    assert path(topology, 1, 15) == [1, 2, 3, 15] and path(topology, 7, 7) == [7]


def test_every_way_of_a_small_ring() -> None:
    """Three chips at 10 B/s in a ring, each with a link to the next and one back, in order of their
    source: 0 to 1 is link 0, 0 to 2 link 1, 1 to 2 link 2, 1 to 0 link 3, 2 to 0 link 4, 2 to 1
    link 5. Of five chips two hops are the longest way."""
    three = ring(3, ranks_per_chip=1, link_bytes_per_s=10)
    assert links_of(three) == [(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)]
    assert three.routes[..., 0].tolist() == [[-1, 0, 1], [3, -1, 2], [4, 5, -1]]
    assert three.routes.shape == (3, 3, 1)
    five = ring(5, ranks_per_chip=1, link_bytes_per_s=10)
    assert five.routes.shape == (5, 5, 2)
    assert [five.routes[0, chip].tolist() for chip in range(5)] == [
        [-1, -1],
        [0, -1],
        [0, 2],
        [1, 9],
        [1, -1],
    ]
    # A move of route ends as the route does: in -1, whichever instance it is in.
    both = ring(5, ranks_per_chip=2, link_bytes_per_s=10, **TWO)
    moves = both.route(np.array([0, 11, 3]), np.array([1, 14, 13]))
    assert moves.tolist() == [[-1, -1], [12, 14], [10, 23]]


TWO: Tier = {"instances": 2, "efa_bytes_per_s": 100, "efa_devices": 1}


def links_of(topology: Topology) -> list[tuple[int, int]]:
    ends = zip(topology.link_source.tolist(), topology.link_target.tolist(), strict=True)
    return [(a, b) for a, b in ends]


def test_ways_around_dead_links() -> None:
    """Of a ring of five without the link of chips 0 and 1: 0 to 1 goes the other way, over 4, 3 and
    2; 0 to 2 and 4 to 1, which crossed it, by three and two other links; what did not cross it
    stays. A slow link keeps its ways, and its rate is a part of what it was, 1 B/s at the least."""
    whole = ring(5, ranks_per_chip=1, link_bytes_per_s=10, **TWO)
    numbers = {ends: n for n, ends in enumerate(links_of(whole)) if -1 not in ends}

    def way(topology: Topology, *chips: int) -> list[int]:
        hops = [numbers[pair] for pair in pairwise(chips)]
        return [*hops, *[-1] * (topology.routes.shape[2] - len(hops))]

    found = degraded(whole, pattern_of({(0, 1): 0.0}))
    assert found.routes.shape == (5, 5, 4)
    for chips in ((0, 4, 3, 2, 1), (1, 2, 3, 4, 0), (0, 4, 3, 2), (2, 3, 4, 0), (4, 3, 2, 1)):
        assert found.routes[chips[0], chips[-1]].tolist() == way(found, *chips)
    for chips in ((0, 4), (0, 4, 3), (1, 2, 3), (3, 4, 0), (2, 3), (4, 3, 2)):
        assert found.routes[chips[0], chips[-1]].tolist() == way(found, *chips)
    assert set(found.routes[2, 2].tolist()) == {-1}
    rates = found.bytes_per_s.tolist()
    assert [n for n, rate in enumerate(rates) if rate == 1] == [numbers[0, 1], numbers[1, 0]]
    assert sorted(rates)[2:10] == [10] * 8
    slow = degraded(whole, pattern_of({(3, 4): 0.26}))
    assert slow.routes is whole.routes
    assert slow.bytes_per_s[[numbers[3, 4], numbers[4, 3]]].tolist() == [3, 3]
    # A square: the way around is no longer than others were, and neither are the rows of routes.
    square = torus(3, 3, ranks_per_chip=1, link_bytes_per_s=10)
    around = degraded(square, pattern_of({(0, 1): 0.0}))
    assert square.routes.shape == around.routes.shape == (9, 9, 2)
    assert path(around, 0, 1) == [0, 2, 1] and path(around, 0, 2) == [0, 2]


def test_another_device_for_one_that_is_dead() -> None:
    """The next in number, and behind the last the first; both directions of a slow one."""
    three = ring(3, ranks_per_chip=1, link_bytes_per_s=10, **(TWO | {"efa_devices": 3}))
    out, arriving = three.efa_out.tolist(), three.efa_in.tolist()
    for dead, taken in ((0, [1, 1, 2]), (1, [0, 2, 2]), (2, [0, 1, 0])):
        found = degraded(three, pattern_of({("efa", dead): 0.0}))
        assert found.efa_out.tolist() == [out[n] for n in taken]
        assert found.efa_in.tolist() == [arriving[n] for n in taken]
    slow = degraded(three, pattern_of({("efa", 1): 0.5}))
    assert slow.efa_out is three.efa_out and slow.efa_in is three.efa_in
    changed = np.flatnonzero(slow.bytes_per_s != three.bytes_per_s).tolist()
    assert changed == [out[1], arriving[1]]
    assert set(slow.bytes_per_s[changed].tolist()) == {16}  # half of 33, of 100 B/s over three


def test_instances_that_would_choose_differently_take_what_is_faster_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All take one algorithm: of those that each would choose the one that is done first."""
    network = Network(TRN1N, 1, {"dp": 32}, "nominal")
    asked = call("all_reduce", 2**20)
    slow, slower = pattern_of({(0, 1): 0.5}), pattern_of({(0, 1): 0.25})
    groups = network.groups(("dp",))
    topologies = [degraded(network.topology, one) for one in (slow, slower)]

    def choosing(*names: str) -> int:
        def chosen(kind: Any, topology: Topology, *_: Any, **__: Any) -> Choice:
            own = alternatives(kind, topology, groups, 2**21, network.costs)
            return own[names[topologies.index(topology)]]

        monkeypatch.setattr("shardwright.sim_cluster.network.network.choose", chosen)
        return network.duration(asked, [slow, slower]).duration_ps

    kinds = list(
        alternatives(CollectiveKind.ALL_REDUCE, topologies[0], groups, 2**21, network.costs)
    )
    assert len(kinds) > 1
    first, second = kinds[:2]
    alone = {name: choosing(name, name) for name in (first, second)}
    assert alone[first] != alone[second]
    assert choosing(first, second) == choosing(second, first) == min(alone.values())


def test_efa_devices() -> None:
    """trn1n: 1600 Gb/s over 16 devices are 12.5 GB/s each; trn1: 800 over 8, one per two chips."""
    topology = cluster_topology(TRN1N, 3)
    rates = topology.bytes_per_s[topology.is_efa]
    assert set(rates.tolist()) == {12_500_000_000} and len(rates) == 2 * 16
    assert topology.efa_out.tolist() == list(range(64, 80))
    assert topology.efa_in.tolist() == list(range(80, 96))
    older = cluster_topology(load_target("trn1.32xlarge"), 2)
    assert set(older.bytes_per_s[older.is_efa].tolist()) == {12_500_000_000}
    assert (older.efa_out - 64).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert (older.efa_in - 72).tolist() == (older.efa_out - 64).tolist()
    # From rank 9, chip 4 of instance 0, to rank 32 * 2 + 3, chip 1 of instance 2: out by device 4,
    # in by device 1; an instance has 64 + 32 links.
    way = topology.route(np.array([9]), np.array([67]))[0].tolist()
    assert [n for n in way if n >= 0] == [64 + 4, 2 * 96 + 80 + 1]
    assert topology.latency_ps[topology.is_efa].tolist() == [0] * 32


def test_other_wirings() -> None:
    """inf2: a ring of 12 and an open line of 6, 48 GB/s; the UltraServer's third side at 64; trn3:
    ports of 256 inside 16 chips, of 320 inside 64."""
    closed = cluster_topology(load_target("inf2.48xlarge"), 1)
    assert sorted(b for a, b in links(closed) if a == 0) == [1, 11]
    assert set(links(closed).values()) == {48} and len(links(closed)) == 24
    assert path(closed, 0, 6) == [0, 1, 2, 3, 4, 5, 6] and path(closed, 0, 7)[1] == 11
    opened = cluster_topology(load_target("inf2.24xlarge"), 1)
    assert len(links(opened)) == 10 and path(opened, 5, 3) == [5, 4, 3]
    assert path(opened, 0, 5) == [0, 1, 2, 3, 4, 5]
    cube = cluster_topology(logical(load_target("trn2-ultraserver")), 1)
    found = links(cube)
    assert found[0, 16] == found[48, 0] == 64 and found[0, 4] == found[0, 1] == 128
    assert len(found) == 64 * 6 and cube.ranks_per_chip == 4
    switch = cluster_topology(logical(load_target("trn3-gen1-ultraserver")), 1)
    assert (switch.bytes_per_s[::64] // GB).tolist() == [256, 256, 320, 320]
    # Ports out and in of 64 chips each: 0..63 and 64..127 inside 16 chips, then 128.. and 192..
    assert switch.routes[3, 15].tolist() == [3, 64 + 15]
    assert switch.routes[3, 16].tolist() == [128 + 3, 192 + 16]
    assert cluster_topology(load_target("trn1.2xlarge"), 1).num_links == 0


def test_where_the_ranks_of_a_mesh_are() -> None:
    """Gray code: along an axis of 8 outside a pair on each chip, addresses 0, 1, 3, 2, 6, 7, 5, 4;
    bits 0 and 1 are columns, bit 2 a row: chips 0, 1, 2, 3, 7, 6, 5, 4."""
    topology = cluster_topology(TRN1N, 1)
    placed = place_mesh("torus", {"row": 2, "dp": 8, "tp": 2}, topology)
    cores = placed.slots.reshape(2, 8, 2)
    assert (cores[0, :, 0] // 2).tolist() == [0, 1, 2, 3, 7, 6, 5, 4]
    assert (cores[0, :, 1] - cores[0, :, 0]).tolist() == [1] * 8
    # The next axis is bit 3, rows: 0, 1, 3, 2 for addresses 0, 1, 3, 2, so row 2's neighbour, 3.
    assert (cores[1, :, 0] // 2).tolist() == [12, 13, 14, 15, 11, 10, 9, 8]
    plain = place_mesh("linear", {"dp": 16, "tp": 2}, topology)
    assert plain.slots.tolist() == list(range(32))
    turned = place_mesh("linear:tp,dp", {"dp": 16, "tp": 2}, topology)
    assert turned.slots[:4].tolist() == [0, 16, 1, 17]


def call(kind: str, elements: int, dtype: DType = DType.BF16) -> CollectiveCall:
    return CollectiveCall(kind, ("dp",), dtype, (1, elements, 1))


def test_bytes_are_those_of_the_larger_side() -> None:
    """nccom-test: a gather's target, 3 * 5 * 7 * 2 B times 8 ranks; else the source."""
    gather = CollectiveCall("all_gather", ("dp",), DType.BF16, (3, 5, 7))
    reduce = CollectiveCall("all_reduce", ("dp",), DType.F32, (3, 5, 7), "add")
    assert (larger_side_bytes(gather, 8), larger_side_bytes(reduce, 8)) == (1680, 420)


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(TRN1N, 1, {"dp": 32}, "nominal")


def test_a_gather_over_an_instance(network: Network) -> None:
    """32 ranks of 512 KiB: 16 MiB, four rings. Chunks of 16 MiB / 32 / 4 = 131,072 B.

    The rank: 4 * 31 * 131,072 = 16,252,928 B at 272 * 0.308 = 83.776 GB/s, 194,004,584 ps. Memory:
    twice that at 410 GB/s and a link: 31 * 131,072 B at 96 GB/s, 42,325,334 ps, take less. Hops: a
    ring has 16 edges inside chips, 1.4 us, and 16 links, 2.1 us, less the cheapest: 54.6 us. The
    launch: 0.7 us.
    """
    found = network.duration(call("all_gather", 262_144))
    assert found.duration_ps == 700_000 + 54_600_000 + 194_004_584
    assert (found.algorithm, found.size_bytes, found.group_size) == ("ring", 16_777_216, 32)
    # 32,505,856 touched bytes in 249.305 us are 130.386 GB/s of 272 * 0.912 = 248.064 of the DMA
    # engines, and of 410 of HBM; each link is busy for 42.325 us of that.
    assert found.demand.dma == pytest.approx(0.525614, rel=1e-5)
    assert found.demand.hbm == pytest.approx(0.318014, rel=1e-5)
    assert [number for number, _ in found.demand.wires] == list(range(64))
    busy = [share for _, share in found.demand.wires]
    assert busy == pytest.approx([0.169774] * 64, rel=1e-5)


def test_a_small_reduction_over_a_chip() -> None:
    """64 KiB of fp32 over two ranks, in one step: 0.7 + 1.4 us, and 65,536 B at 55.85 GB/s.

    In two steps: 0.7 + 2.8 us, 32,768 B at 55.85 and as many at 83.776 GB/s, 0.978 us together.
    """
    network = Network(TRN1N, 1, {"rest": 16, "dp": 2}, "nominal")
    found = network.alternatives(call("all_reduce", 16_384, DType.F32))
    assert found["single step mesh"] == 700_000 + 1_400_000 + 1_173_415
    assert found["mesh"] == 700_000 + 2_800_000 + 586_708 + 391_139
    chosen = network.duration(call("all_reduce", 16_384, DType.F32))
    assert chosen.duration_ps == 3_273_415 and chosen.algorithm == "single_step_mesh"


def test_an_exchange_over_two_instances() -> None:
    """Pairs of ranks of two instances, 2 MiB each: each sends 1 MiB of its gather by the device of
    its chip, which both ranks use: 2,097,152 B at 12.5 * 0.625 GB/s = 268,435,456 ps; 18 us a hop.
    Before 2023-12 both instances met first: 500 us."""
    mesh = {"dp": 2, "shard": 32}
    network = Network(TRN1N, 2, mesh, "nominal")
    gather = call("all_gather", 524_288)
    assert network.duration(gather).duration_ps == 700_000 + 18_000_000 + 268_435_456
    met = Network(TRN1N, 2, mesh, "nominal", runtime=runtime_named("2023"))
    assert met.duration(gather).duration_ps == 287_135_456 + 500_000_000
    reduce = call("all_reduce", 1_048_576)
    later = met.duration(reduce).duration_ps - network.duration(reduce).duration_ps
    assert later == 1_000_000_000
    alone = call("all_reduce", 1)  # fewer elements than ranks: they meet once
    assert met.duration(alone).duration_ps - network.duration(alone).duration_ps == 500_000_000


def test_a_logical_core_of_two_on_the_network() -> None:
    """Four ranks of a trn2 chip, 1 MiB in all, in one step: 0.7 + 1.4 us, and 3 * 262,144 B at 2 *
    16 * 23 * 0.308 = 226.688 GB/s, 3,469,227 ps. 1,572,864 touched bytes in 5,569,227 ps are
    0.420749 of 2 * 368 * 0.912 GB/s and 0.389546 of 2 * 362.5."""
    network = Network(logical(load_target("trn2.48xlarge")), 1, {"rest": 16, "dp": 4}, "nominal")
    found = network.duration(call("all_gather", 131_072))
    assert (found.duration_ps, found.algorithm) == (5_569_227, "mesh")
    assert found.demand.dma == pytest.approx(0.420749, rel=1e-5)
    assert found.demand.hbm == pytest.approx(0.389546, rel=1e-5)
    assert found.demand.wires == ()


def test_what_a_runtime_adds_to_every_alternative() -> None:
    """Two elements over two ranks of two instances meet twice, one element once."""
    mesh = {"dp": 2, "shard": 32}
    old, new = (
        Network(TRN1N, 2, mesh, "nominal", runtime=runtime_named(n)) for n in ("2023", "current")
    )
    for elements, added in ((1, 500_000_000), (2, 1_000_000_000)):
        before, now = (n.alternatives(call("all_reduce", elements)) for n in (old, new))
        assert {name: before[name] - now[name] for name in now} == dict.fromkeys(now, added)
        assert old.duration(call("all_reduce", elements)).duration_ps in before.values()
