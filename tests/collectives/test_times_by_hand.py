"""Times of collectives on small machines, worked out by hand.

A formula of the pages on collectives: launch + steps x hop + bytes / bandwidth, where each phase is
as slow as its slowest resource. Rates are made so that a byte takes whole picoseconds: 1 to copy
into a rank, 3 to reduce, 10 over a link; hops take 100 ps inside an instance and 5000 across, wires
7 and launching 1000 more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.groups.layout import place
from shardwright.collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups
from shardwright.collectives.select import choose
from shardwright.collectives.timing.runtimes import (
    CURRENT,
    RUNTIMES,
    runtime_named,
    runtime_of_date,
)
from shardwright.collectives.timing.times import (
    CollectiveTime,
    bus_bytes_per_s,
    closed_time,
    in_step,
    wires_ps,
)
from shardwright.collectives.topology import Topology, line, ring, torus, unlinked
from tests.support.collective_schedules import Carried, carried, schedule_time, schedule_wires_ps

GATHER, REDUCE, SCATTER = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
)
ALL_TO_ALL, PERMUTE = CollectiveKind.ALL_TO_ALL, CollectiveKind.COLLECTIVE_PERMUTE

COSTS = CollectiveCosts(
    profile="by hand",
    launch_ps=1000,
    intra_hop_ps=100,
    inter_hop_ps=5000,
    rank_copy_bytes_per_s=10**12,
    rank_reduce_bytes_per_s=333_333_333_334,  # 3 ps per byte, rounded up
    rank_hbm_bytes_per_s=10**15,
    efa_efficiency=0.5,
    mesh_max_bytes=0,
)
FAST, SLOW = 10**13, 10**11  # links: 0.1 and 10 ps per byte


def chips(number: int, rate: int = FAST, per_chip: int = 1) -> Topology:
    return ring(number, ranks_per_chip=per_chip, link_bytes_per_s=rate, link_latency_ps=7)


def all_of(topology: Topology) -> ReplicaGroups:
    return ReplicaGroups((tuple(range(topology.num_ranks)),))


def timed(
    kind: CollectiveKind,
    topology: Topology,
    size: int,
    names: tuple[str, ...],
    groups: ReplicaGroups | None = None,
    costs: CollectiveCosts = COSTS,
    pairs: tuple[tuple[int, int], ...] = (),
) -> CollectiveTime:
    """Time under one algorithm, in closed form; counted move by move it is the same."""
    choice = choice_of(kind, topology, names, groups, pairs)
    found = closed_time(choice, size, 4, costs)
    assert found == schedule_time(choice, size, 4, costs)
    return found


def choice_of(
    kind: CollectiveKind,
    topology: Topology,
    names: tuple[str, ...],
    groups: ReplicaGroups | None = None,
    pairs: tuple[tuple[int, int], ...] = (),
) -> Choice:
    layout = place(topology, groups or all_of(topology))
    return Choice(kind, layout, names[0], "", *names[1:], pairs=pairs)


def bytes_of(
    kind: CollectiveKind,
    topology: Topology,
    names: tuple[str, ...],
    pairs: tuple[tuple[int, int], ...] = (),
) -> Carried:
    """What 4096 B under one algorithm load where it is busiest."""
    return carried(choice_of(kind, topology, names, pairs=pairs), 4096, 4, COSTS)


RING, MESH = ("ring",), ("mesh",)

# Four chips of one rank, 4096 B: two rings, one per direction, with chunks of 4096 / 4 / 2 = 512 B.
# A rank receives 3 chunks per ring: 3072 B. 3 steps of a hop and a wire are 3 * 107 = 321.
ON_FOUR: dict[str, tuple[CollectiveKind, int, int]] = {
    "gather": (GATHER, 4096, 1000 + 321 + 3072),
    "scatter": (SCATTER, 4096, 1000 + 321 + 3 * 3072),
    "reduce": (REDUCE, 4096, 1000 + 642 + 3072 + 3 * 3072),
    # 1025 elements are ceil(1025 / 8) = 129 per chunk, 516 B; so are 4097 B, 1025 elements begun
    "an element more": (GATHER, 4100, 1000 + 321 + 3096),
    "a byte more": (GATHER, 4097, 1000 + 321 + 3096),
}


@pytest.mark.parametrize("case", ON_FOUR)
def test_rings_of_four_chips(case: str) -> None:
    kind, size, wanted = ON_FOUR[case]
    found = timed(kind, chips(4), size, RING)
    assert (found.total_ps, found.bound) == (wanted, "rank")
    assert found.launch_ps == 1000
    assert found.total_ps == found.launch_ps + found.latency_ps + found.transfer_ps
    assert sum(found.phases_ps) == found.transfer_ps


def test_what_a_ring_moves() -> None:
    """Reducing: 3072 B with three touches, then 3072 with two; 1536 B per link in each half."""
    found = timed(REDUCE, chips(4), 4096, RING)
    assert found.phases_ps == (9216, 3072)
    assert found.touch_bytes_per_rank == 9216 + 6144
    assert bytes_of(REDUCE, chips(4), RING) == Carried(rank=6144, link=3072, efa=0)


def test_a_slow_link_and_a_slow_bank() -> None:
    """1536 B at 10 ps; 2 * 3072 touched bytes at 5 ps, 3 * 3072 when reducing."""
    found = timed(GATHER, chips(4, SLOW), 4096, RING)
    assert (found.total_ps, found.bound) == (1000 + 321 + 15_360, "link")
    bank = replace(COSTS, rank_hbm_bytes_per_s=2 * 10**11)
    found = timed(GATHER, chips(4), 4096, RING, costs=bank)
    assert (found.total_ps, found.bound) == (1000 + 321 + 30_720, "hbm")
    found = timed(SCATTER, chips(4), 4096, RING, costs=bank)
    assert (found.total_ps, found.bound) == (1000 + 321 + 46_080, "hbm")


def test_two_ranks_of_a_chip_use_no_wire() -> None:
    """Rings of 0 1 | 2 3 | 4 5 | 6 7: 8 edges, 4 of them links; the cheapest, inside a chip, is
    left out: 3 * 100 + 4 * 107. Chunks of 4096 / 8 / 2 = 256 B, 2 * 7 received: 3584. Twice round
    leaves out two edges that follow each other: 16 edges less 100 + 107."""
    pair = chips(4, per_chip=2)
    assert timed(GATHER, pair, 4096, RING).total_ps == 1000 + 728 + 3584
    found = timed(REDUCE, pair, 4096, RING)
    assert found.total_ps == 1000 + (8 * 100 + 8 * 107 - 207) + 3584 + 3 * 3584


def test_a_mesh_of_four_chips() -> None:
    """One step; opposite chips are two wires apart: 114. Chunks of 1024 B, 3 received. The links of
    one direction carry both opposite pairs' moves: 1 + 2 chunks, at 10 ps per byte."""
    found = timed(GATHER, chips(4), 4096, MESH)
    assert found.total_ps == 1000 + 114 + 3072
    slow = timed(GATHER, chips(4, SLOW), 4096, MESH)
    assert (slow.total_ps, slow.bound) == (1000 + 114 + 30_720, "link")
    assert bytes_of(GATHER, chips(4, SLOW), MESH).link == 3072
    assert timed(REDUCE, chips(4), 4096, MESH).total_ps == 1000 + 228 + 3072 + 9216


def test_a_single_step_reduces_whole_buffers() -> None:
    """Three buffers of 4096 B arrive at 3 ps per byte."""
    found = timed(REDUCE, chips(4), 4096, ("single_step_mesh",))
    assert found.total_ps == 1000 + 114 + 3 * 3 * 4096


def test_pairwise_and_direct_exchanges() -> None:
    """all_to_all: three pieces of 1024 B; a permute: the whole source, one link further."""
    assert timed(ALL_TO_ALL, chips(4), 4096, ("pairwise",)).total_ps == 1000 + 114 + 3072
    shift = ((0, 1), (1, 2), (2, 3), (3, 0))
    found = timed(PERMUTE, chips(4, SLOW), 4096, ("direct",), pairs=shift)
    assert (found.total_ps, found.bound) == (1000 + 107 + 40_960, "link")
    back = timed(PERMUTE, chips(4), 4096, ("direct",), pairs=((0, 2),))
    assert back.total_ps == 1000 + 114 + 4096
    # A rank that sends to several receives from one: what it sends bounds it, too.
    out = ReplicaGroups(((0, 1), (2, 3)))
    assert timed(PERMUTE, chips(4), 4096, ("direct",), out, pairs=((0, 1),)).total_ps == 5203


def two_instances(devices: int = 1, per_chip: int = 1) -> Topology:
    """Two instances of two chips; their EFA devices carry 0.2 B/ps together."""
    return line(
        2,
        ranks_per_chip=per_chip,
        link_bytes_per_s=FAST,
        instances=2,
        efa_bytes_per_s=2 * 10**11,
        efa_devices=devices,
        link_latency_ps=7,
    )


def test_a_hierarchy_gathers_across_and_then_inside() -> None:
    """4096 B over 2 x 2 ranks: chunks of 1024. Across: each rank sends its chunk, both by the one
    device of half of 0.2 B/ps: 2048 B at 10 ps, and a hop of 5000. Inside: each passes on two
    chunks, 2048 B at 1 ps, and 107."""
    rings = ("hierarchical", "ring", "ring")
    found = timed(GATHER, two_instances(), 4096, rings)
    assert found.phases_ps == (20_480, 2048)
    assert found.total_ps == 1000 + 5000 + 107 + 22_528
    moved = bytes_of(GATHER, two_instances(), rings)
    assert (found.bound, moved.efa, moved.rank) == ("efa", 2048, 3072)
    # A device for each chip, of 0.1 B/ps each: half of the bytes at half of the rate.
    mixed = ("hierarchical", "mesh", "recursive")
    assert timed(GATHER, two_instances(2), 4096, mixed).phases_ps == (20_480, 2048)
    assert bytes_of(GATHER, two_instances(2), mixed).efa == 1024


def test_a_hierarchy_reduces_inside_across_across_and_inside() -> None:
    """Two chunks of 1024 B at 3 ps; one chunk per rank across, twice; two chunks at 1 ps."""
    found = timed(REDUCE, two_instances(), 4096, ("hierarchical", "mesh", "ring"))
    assert found.phases_ps == (6144, 20_480, 20_480, 2048)
    assert found.total_ps == 1000 + 2 * 5107 + 49_152
    scattered = timed(SCATTER, two_instances(), 4096, ("hierarchical", "mesh", "ring"))
    assert scattered.phases_ps == (6144, 20_480)


def test_a_flat_ring_goes_once_through_all_instances() -> None:
    """Two channels of four ranks, chunks of 512 B: 4 edges, two of them across: 2 * 5000 + 2 * 107
    less the cheapest. Each channel sends 3 chunks by the one device: 2 * 1536 B at 10 ps."""
    found = timed(GATHER, two_instances(), 4096, ("flat_ring",))
    assert found.latency_ps == 2 * 5000 + 107
    assert found.phases_ps == (30_720,)
    assert bytes_of(GATHER, two_instances(), ("flat_ring",)).efa == 3072


def test_doubling_across_four_instances() -> None:
    """One rank each: chunks of 1024 B, 1 and then 2 of them, by devices of 0.1 B/ps at half."""
    four = unlinked(ranks_per_chip=1, instances=4, efa_bytes_per_s=10**11, efa_devices=1)
    found = timed(GATHER, four, 4096, ("hierarchical", "ring", "recursive"))
    assert found.phases_ps == (20_480, 40_960) and found.latency_ps == 10_000
    ringed = timed(GATHER, four, 4096, ("hierarchical", "ring", "ring"))
    assert ringed.phases_ps == (61_440,) and ringed.latency_ps == 15_000


def test_kangaring_touches_less() -> None:
    """A chip of four ranks, rings 0 1 2 3 and back. Gathering: each rank is first of its pair in
    one of the two rings, chunks of 512 B. As first it receives 1 * 2 chunks, and its neighbour's
    copies are 3 touches more: 2 * 2 + 3 = 7 touches, 1024 B at 1 ps and 1536 at half of that. Hops:
    one on the ring, one to the neighbour."""
    chip = unlinked(ranks_per_chip=4)
    found = timed(GATHER, chip, 4096, ("kangaring",))
    assert found.touch_bytes_per_rank == 7 * 512
    assert found.total_ps == 1000 + 200 + 1024 + 768
    # Reducing: 2 chunks with 3 touches each; (4 + 1) * 1 operands read once more.
    found = timed(SCATTER, chip, 4096, ("kangaring",))
    assert found.touch_bytes_per_rank == 11 * 512
    assert found.total_ps == 1000 + 200 + 3 * 1024 + 1280


def test_wires_keep_count_of_both_halves() -> None:
    """Each of 8 directed links of four chips carries 1536 B in each half of a reduction: 10 ps per
    byte. A device has its efficiency: 2048 B of 0.2 B/ps at half, sent and received."""
    layout = place(chips(4, SLOW), all_of(chips(4, SLOW)))
    for wires in (wires_ps, schedule_wires_ps):
        found = wires(Choice(REDUCE, layout, "ring", ""), 4096, 4, COSTS)
        assert found == tuple((n, 30_720) for n in range(8))
    there = two_instances()
    choice = Choice(GATHER, place(there, all_of(there)), "hierarchical", "", "ring", "ring")
    # Links 0 and 1 carry 2048 B at 0.1 ps
    assert wires_ps(choice, 4096, 4, COSTS) == ((0, 205), (1, 205), (2, 20_480), (3, 20_480))
    alone = Choice(GATHER, place(there, ReplicaGroups(((0,), (1,)))), "ring", "")
    assert wires_ps(alone, 4096, 4, COSTS) == schedule_wires_ps(alone, 4096, 4, COSTS) == ()
    pair = unlinked(ranks_per_chip=2, instances=2, efa_bytes_per_s=2 * 10**11, efa_devices=1)
    across = Choice(GATHER, place(pair, ReplicaGroups(((0, 2),))), "ring", "")
    found = schedule_wires_ps(across, 4096, 4, COSTS)
    assert found == ((0, 20_480), (1, 20_480)) == wires_ps(across, 4096, 4, COSTS)


def test_instances_that_are_not_alike_keep_step() -> None:
    """Phases of 5, 9 and of 7, 2: 7 + 9; the longer chain; the rest is of the slower one."""
    one = timed(REDUCE, chips(4), 4096, RING)
    a = replace(one, phases_ps=(5, 9), latency_ps=3, launch_ps=1, total_ps=18, transfer_ps=14)
    b = replace(one, phases_ps=(7, 2), latency_ps=4, launch_ps=1, total_ps=14, transfer_ps=9)
    b = replace(b, bound="link")
    both = in_step([b, a])
    assert both.bound == "rank"
    assert (both.phases_ps, both.transfer_ps, both.latency_ps) == ((7, 9), 16, 4)
    assert both.total_ps == 1 + 4 + 16


def test_bus_bandwidth() -> None:
    """nccom-test: 2 (r - 1) / r for all_reduce, 1 for permutes, else (r - 1) / r. 1000 B in 1 us
    over 8 ranks are 1 GB/s times 1.75, 0.875 and 1."""
    assert bus_bytes_per_s(REDUCE, 8, 1000, 10**6) == 1.75e9
    for kind in (GATHER, SCATTER, ALL_TO_ALL):
        assert bus_bytes_per_s(kind, 8, 1000, 10**6) == 0.875e9
    assert bus_bytes_per_s(PERMUTE, 8, 1000, 10**6) == 1e9


# Which algorithms may be used.


def chosen(topology: Topology, size: int, **settings: Any) -> str:
    costs = replace(COSTS, **settings)
    choice = choose(GATHER, topology, all_of(topology), size, 4, costs)
    return " ".join(filter(None, (choice.algorithm, choice.inside, choice.across)))


def test_thresholds_hold_at_their_value() -> None:
    """Mesh up to its most, doubling up to its most, flat rings from their least on."""
    grid = torus(2, 2, ranks_per_chip=2, link_bytes_per_s=FAST)
    grouped = {"mesh": "grouped", "mesh_max_bytes": 512, "rdh_max_bytes": 1024}
    assert chosen(grid, 512, **grouped) == "grouped_mesh"
    assert chosen(grid, 516, **grouped) == "rdh"
    assert chosen(grid, 1024, **grouped) == "rdh"
    assert chosen(grid, 1028, **grouped) == "ring"
    assert chosen(grid, 512, mesh_max_bytes=512) == "mesh"
    # One rank per chip has nothing to group; nor has one chip.
    assert chosen(torus(2, 2, ranks_per_chip=1, link_bytes_per_s=FAST), 512, **grouped) == "mesh"
    assert chosen(unlinked(ranks_per_chip=4), 512, **grouped) == "mesh"
    assert chosen(unlinked(ranks_per_chip=4), 1024, **grouped) == "ring"
    quads = torus(2, 2, ranks_per_chip=4, link_bytes_per_s=FAST)
    assert chosen(quads, 1028, **grouped, kangaring=True) == "kangaring"
    assert chosen(grid, 1028, **grouped, kangaring=True) == "ring"  # it needs four per chip


def test_what_may_run_across_instances() -> None:
    """Doubling for powers of two, if the runtime has it; a mesh for small messages and up to four
    instances; flat rings from their least size on."""

    def of(instances: int) -> Topology:
        return unlinked(
            ranks_per_chip=2, instances=instances, efa_bytes_per_s=10**13, efa_devices=1
        )

    def across(instances: int, size: int, **settings: object) -> str:
        return chosen(of(instances), size, **settings).removeprefix("hierarchical ")

    assert across(4, 4096) == "ring recursive"
    assert across(3, 4096).startswith("ring ")
    named = "recursive", "mesh"  # and all else that is offered is for any number of instances
    assert not across(3, 4096).endswith(named)
    assert not across(4, 4096, inter_recursive=False).endswith(named)
    small = {"mesh_max_bytes": 4096, "inter_recursive": False}
    assert across(4, 4096, **small) == "mesh mesh"
    assert across(5, 4096, **small).startswith("mesh ")
    assert not across(5, 4096, **small).endswith(named)
    assert across(4, 4100, **small).startswith("ring ")
    assert not across(4, 4100, **small).endswith(named)
    flat = {"flat_ring_min_bytes": 4096, "inter_recursive": False, "intra_hop_ps": 0}
    near = replace(COSTS, **flat, inter_hop_ps=0)
    there = of(2)
    for size, offered in ((4096, True), (4092, False)):
        choice = choose(GATHER, there, all_of(there), size, 4, near)
        assert ("flat ring" in choice.why) == offered, choice.why


# What the runtime of a release adds.

MEETINGS: dict[str, tuple[CollectiveKind, int, int, int]] = {
    # Two instances of two chips of two ranks; 500 us per meeting before 2023-12: one for each half
    # of an all_reduce, but one alone where there are fewer elements than the 8 ranks.
    "reduce": (REDUCE, 8, 1000, 80),
    "small reduce": (REDUCE, 7, 500, 40),
    "gather": (GATHER, 8, 500, 40),
    "small gather": (GATHER, 1, 500, 40),
}


@pytest.mark.parametrize("case", MEETINGS)
def test_meetings_of_instances(case: str) -> None:
    kind, elements, of_2023, of_2024 = MEETINGS[case]
    there = two_instances(per_chip=2)
    first = timed(kind, there, 64, ("hierarchical", "ring", "ring"))
    for name, added_us in (("2023", of_2023), ("2024", of_2024), ("current", 0)):
        found = runtime_named(name).launching(first, kind, there, all_of(there), elements)
        assert found.total_ps - first.total_ps == added_us * 1_000_000
        assert found.launch_ps - first.launch_ps == added_us * 1_000_000


def test_launch_floors_inside_an_instance() -> None:
    """Before 2023-12: 50 us for ranks of one chip, 150 us for ranks of several; nothing later."""
    there = two_instances(per_chip=2)
    first = timed(GATHER, there, 64, RING, ReplicaGroups(((0, 1), (2, 3))))
    on_chip, inside = ReplicaGroups(((0, 1), (2, 3))), ReplicaGroups(((0, 1, 2, 3), (4, 5, 6, 7)))
    for groups, added_us in ((on_chip, 50), (inside, 150)):
        found = runtime_named("2023").launching(first, GATHER, there, groups, 8)
        assert found.total_ps - first.total_ps == added_us * 1_000_000
        found = runtime_named("2024").launching(first, GATHER, there, groups, 8)
        assert found == first


def test_dates_of_runtimes() -> None:
    """Release notes: the barrier of 500 us is gone from 2023-12 on. A year alone is its June."""
    dates = ("2023-11", "2023-12", "2023", "2024-12", "2025-01", "2024", "2023-13", "2022-01")
    names = [runtime_of_date(date).name for date in dates]
    assert names == ["2023", "2024", "2023", "2024", "current", "2024", "2023", "2023"]
    assert [runtime.until for runtime in RUNTIMES] == ["2023-11", "2024-12", ""]
    assert runtime_of_date("no date").name == CURRENT.name == "current"


@pytest.mark.parametrize(
    ("name", "worst"),
    [
        ("rank_copy_bytes_per_s", 0),
        ("rank_reduce_bytes_per_s", 0),
        ("rank_hbm_bytes_per_s", 0),
        ("efa_efficiency", 0.0),
        ("efa_efficiency", 1.01),
        ("launch_ps", -1),
        ("intra_hop_ps", -1),
        ("inter_hop_ps", -1),
        ("mesh_max_bytes", -1),
        ("rdh_max_bytes", -1),
        ("flat_ring_min_bytes", -1),
        ("mesh", "star"),
    ],
)
def test_costs_out_of_range_are_refused(name: str, worst: Any) -> None:
    with pytest.raises(CollectiveError, match=name):
        replace(COSTS, **{name: worst})
    least = {"efa_efficiency": 1.0, "mesh": "grouped"}.get(name, 1 if "per_s" in name else 0)
    assert getattr(replace(COSTS, **{name: least}), name) == least


# What is not alike everywhere.


def test_the_slowest_of_links_of_two_rates() -> None:
    """Rows of 0.1 and columns of 10 ps per byte. Row first, so that 0 > 1 carries what goes to 1
    and to 3, and 1 > 3 what comes from 1 and from 0: two chunks of 1024 B each, at 10 ps."""
    grid = torus(2, 2, ranks_per_chip=1, link_bytes_per_s=(SLOW, FAST), link_latency_ps=7)
    found = timed(GATHER, grid, 4096, MESH)
    assert (found.total_ps, found.bound) == (1000 + 114 + 20_480, "link")


def test_the_slowest_of_two_devices() -> None:
    """0.1 and 0.05 B/ps at half: 1024 B at 20 ps."""
    there = two_instances(2)
    rates = there.bytes_per_s.copy()
    rates[there.is_efa] //= [1, 2, 1, 2]
    own = replace(there, bytes_per_s=rates)
    found = timed(GATHER, own, 4096, ("hierarchical", "mesh", "ring"))
    assert found.phases_ps == (40_960, 2048)


def test_a_rank_that_only_receives_is_the_busiest() -> None:
    """One pair of four ranks: 4096 B arrive, 8192 are touched, by 5 ps each as slow as memory."""
    bank = replace(COSTS, rank_hbm_bytes_per_s=2 * 10**11)
    found = timed(PERMUTE, chips(4), 4096, ("direct",), costs=bank, pairs=((0, 1),))
    assert bytes_of(PERMUTE, chips(4), ("direct",), pairs=((0, 1),)).rank == 4096
    assert found.touch_bytes_per_rank == 8192
    assert (found.total_ps, found.bound) == (1000 + 107 + 40_960, "hbm")


def test_kangaring_both_ways() -> None:
    """A hop on the ring and one to the neighbour in each half; 1024 + 768 and 3072 + 1280 ps."""
    found = timed(REDUCE, unlinked(ranks_per_chip=4), 4096, ("kangaring",))
    assert found.total_ps == 1000 + 400 + 1792 + 4352


def test_a_group_of_one_and_less_than_an_element() -> None:
    there = chips(2)
    alone = ReplicaGroups(((0,), (1,)))
    found = timed(REDUCE, there, 4096, ("none",), alone)
    assert not any((found.total_ps, found.launch_ps, found.latency_ps, found.transfer_ps))
    assert not found.touch_bytes_per_rank and not found.phases_ps
    # An element moves in one of four chunks, the least there is.
    assert timed(GATHER, there, 4, MESH).total_ps == 1000 + 107 + 4
    for size, element in ((3, 4), (4, 0)):
        choice = Choice(GATHER, place(there, all_of(there)), "mesh", "")
        for time in (closed_time, schedule_time):
            with pytest.raises(CollectiveError, match=f"at least one element of {element} B"):
                time(choice, size, element, COSTS)
