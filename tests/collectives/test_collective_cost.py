from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.groups.layout import place
from shardwright.collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups
from shardwright.collectives.select import choose, collective_time
from shardwright.collectives.timing.times import bus_bytes_per_s, closed_time, wires_ps
from shardwright.collectives.topology import line, ring, switched, torus, unlinked
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import load_target, logical
from shardwright.sim_cluster.network.collective_costs import collective_costs
from tests.support.collective_schedules import carried, schedule_time, schedule_wires_ps
from tests.support.machines import CONSERVATIVE, NOMINAL, PEAK, PROFILES, machine

GATHER, REDUCE, SCATTER = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
)
KINDS = [GATHER, REDUCE, SCATTER, CollectiveKind.ALL_TO_ALL]
US = 10**6
MIB = 1 << 20


def everyone(topology):
    return ReplicaGroups((tuple(range(topology.num_ranks)),))


def wide_ring(chips, rate=10**12):
    return ring(chips, ranks_per_chip=1, link_bytes_per_s=rate)


@st.composite
def machines(draw):
    tier = {"instances": draw(st.integers(1, 5)), "ranks_per_chip": draw(st.integers(1, 4))}
    tier["link_latency_ps"] = draw(st.sampled_from([0, 700_000]))
    rate = draw(st.sampled_from([10**9, 48 * 10**9, 96 * 10**9]))
    shape = draw(st.sampled_from(["torus", "ring", "line", "unlinked", "switch", "cube"]))
    if tier["instances"] > 1:
        devices = draw(st.integers(1, 3))
        tier |= {"efa_devices": devices, "efa_bytes_per_s": devices * 12_500_000_000}
    if shape == "unlinked":
        return unlinked(**tier)
    if shape == "switch":
        return switched(6, [(2, rate), (6, 3 * rate)], **tier)
    if shape == "cube":
        return torus(2, 2, draw(st.integers(1, 3)), link_bytes_per_s=(rate, 2 * rate, rate), **tier)
    if shape == "torus":
        rows, cols = draw(st.integers(2, 4)), draw(st.integers(2, 4))
        return torus(rows, cols, link_bytes_per_s=rate, **tier)
    make = ring if shape == "ring" else line
    return make(draw(st.integers(1, 6)), link_bytes_per_s=rate, **tier)


@st.composite
def placed(draw):
    """A machine and groups over some axes of a mesh that fills it."""
    machine = draw(machines())
    mesh, rest = {}, machine.num_ranks
    for axis in "abc":
        divisors = [d for d in range(1, rest + 1) if rest % d == 0]
        mesh[axis] = draw(st.sampled_from(divisors))
        rest //= mesh[axis]
    mesh["d"] = rest
    axes = draw(st.lists(st.sampled_from(list(mesh)), min_size=1, max_size=3, unique=True))
    groups = ReplicaGroups.from_axes(mesh, axes).groups
    if draw(st.booleans()):
        turn = draw(st.permutations(range(len(groups[0]))))
        groups = tuple(tuple(g[i] for i in turn) for g in groups)
    return machine, ReplicaGroups(groups)


# Settings that leave one algorithm, inside and across instances.
FORCED = {
    "as chosen": {},
    "grouped mesh": {"mesh": "grouped", "mesh_max_bytes": 1 << 40},
    "doubling": {"mesh_max_bytes": 0, "rdh_max_bytes": 1 << 40},
    "kangaring": {"mesh_max_bytes": 0, "rdh_max_bytes": 0, "kangaring": True},
    "rings": {
        "mesh_max_bytes": 0,
        "rdh_max_bytes": 0,
        "kangaring": False,
        "inter_recursive": False,
        "flat_ring_min_bytes": 0,
    },
    "mesh across": {"mesh_max_bytes": 1 << 40, "inter_recursive": False},
}


@settings(deadline=None, max_examples=200)
@given(
    placed(),
    st.sampled_from(KINDS),
    st.integers(4, 200_000_000),
    st.sampled_from(list(PROFILES.values())),
    st.sampled_from([*FORCED, "flat ring", "single step"]),
)
def test_closed_form_equals_the_schedule(where, kind, size, costs, forced):
    machine, groups = where
    costs = replace(costs, **FORCED.get(forced, {}))
    choice = choose(kind, machine, groups, size, 4, costs)
    layout = choice.layout
    if forced == "flat ring" and layout.num_instances > 1 and kind is not KINDS[3]:
        choice = Choice(kind, layout, "flat_ring", "forced")
    if forced == "single step" and kind is REDUCE and layout.group_size <= 16:
        choice = Choice(kind, layout, "single_step_mesh", "forced")
    assert closed_time(choice, size, 4, costs) == schedule_time(choice, size, 4, costs)
    assert wires_ps(choice, size, 4, costs) == schedule_wires_ps(choice, size, 4, costs)
    for number in range(min(2, len(groups.groups))):
        choice.schedule(number).verify()


TRN2 = load_target("trn2.48xlarge")


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("forced", ["grouped mesh", "doubling", "kangaring", "rings"])
@pytest.mark.parametrize("instances", [1, 2])
def test_algorithms_of_trn2_deliver_and_cost_what_their_schedules_do(kind, forced, instances):
    target = logical(TRN2)
    costs = collective_costs(target, "nominal", **FORCED[forced])
    topology = cluster_topology(target, instances)
    assert topology.ranks_per_chip == 4
    choice = choose(kind, topology, everyone(topology), 4 * MIB, 4, costs)
    names = {"grouped mesh": "grouped_mesh", "doubling": "rdh", "rings": "ring"}
    assert (choice.inside or choice.algorithm) == names.get(forced, forced)
    choice.schedule().verify()
    assert closed_time(choice, 4 * MIB, 4, costs) == schedule_time(choice, 4 * MIB, 4, costs)


def test_kangaring_touches_memory_less_and_hops_half_as_often():
    target = logical(TRN2)
    topology, size = cluster_topology(target, 1), 64 * MIB
    times, links = {}, {}
    for name in ("rings", "kangaring"):
        costs = collective_costs(target, "nominal", **FORCED[name])
        for kind in (GATHER, SCATTER):
            choice = choose(kind, topology, everyone(topology), size, 4, costs)
            times[name, kind] = closed_time(choice, size, 4, costs)
            links[name, kind] = carried(choice, size, 4, costs).link
    for kind, share in ((GATHER, 3 / 4), (SCATTER, 4 / 6)):
        ring, kanga = times["rings", kind], times["kangaring", kind]
        touches = kanga.touch_bytes_per_rank / ring.touch_bytes_per_rank
        assert touches == pytest.approx(share, rel=0.02)
        assert kanga.latency_ps < 0.6 * ring.latency_ps
        assert links["kangaring", kind] == pytest.approx(links["rings", kind], rel=0.02)


def test_doubling_takes_one_hop_per_direction_of_the_torus():
    """Four directions between chips, one step inside of them: no hop crosses two links."""
    target = logical(TRN2)
    costs = collective_costs(target, "nominal", **FORCED["doubling"])
    topology = cluster_topology(target, 1)
    choice = choose(GATHER, topology, everyone(topology), 4 * MIB, 4, costs)
    time = closed_time(choice, 4 * MIB, 4, costs)
    wire = target.collectives.wire_ps
    assert time.latency_ps == 5 * costs.intra_hop_ps + 4 * wire
    cube = load_target("trn2-ultraserver")
    large = cluster_topology(logical(cube), 1)
    choice = choose(GATHER, large, everyone(large), 4 * MIB, 4, costs)
    assert closed_time(choice, 4 * MIB, 4, costs).latency_ps == 7 * costs.intra_hop_ps + 6 * wire


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_irregular_groups_still_have_equal_closed_form(data):
    machine = torus(
        2,
        3,
        ranks_per_chip=2,
        link_bytes_per_s=10**9,
        instances=3,
        efa_bytes_per_s=10**9,
        efa_devices=2,
    )
    size = data.draw(st.integers(2, 6))
    ranks = data.draw(st.permutations(range(machine.num_ranks)))
    groups = ReplicaGroups(tuple(tuple(ranks[i : i + size]) for i in range(0, 4 * size, size)))
    kind = data.draw(st.sampled_from(KINDS))
    choice = choose(kind, machine, groups, 40_000, 4, NOMINAL)
    assert closed_time(choice, 40_000, 4, NOMINAL) == schedule_time(choice, 40_000, 4, NOMINAL)
    choice.schedule(3).verify()


@pytest.mark.parametrize("ranks", [2, 7, 64, 128])
def test_a_ring_costs_the_textbook_formula(ranks):
    costs = replace(NOMINAL, mesh_max_bytes=0)
    size = ranks * 4096
    chunk = size // ranks // (2 if ranks > 2 else 1)
    lanes = 2 if ranks > 2 else 1
    moved = lanes * (ranks - 1) * chunk
    copy = -(-moved * 10**12 // costs.rank_copy_bytes_per_s)
    add = -(-moved * 10**12 // costs.rank_reduce_bytes_per_s)
    hops = (ranks - 1) * costs.intra_hop_ps
    topology = wide_ring(ranks)
    wanted = {GATHER: hops + copy, SCATTER: hops + add, REDUCE: 2 * hops + copy + add}
    for kind, rest in wanted.items():
        time = collective_time(kind, topology, everyone(topology), size, 4, costs)
        assert time.total_ps == costs.launch_ps + rest
        choice = choose(kind, topology, everyone(topology), size, 4, costs)
        assert schedule_time(choice, size, 4, costs) == time
        received = carried(choice, size, 4, costs).rank
        assert time.algorithm == "ring" and received == moved * (2 if kind is REDUCE else 1)


def test_slow_links_bound_a_ring_and_both_directions_share_it():
    topology = wide_ring(8, rate=10**9)
    costs = replace(NOMINAL, mesh_max_bytes=0)
    choice = choose(GATHER, topology, everyone(topology), 8 * MIB, 4, costs)
    time = closed_time(choice, 8 * MIB, 4, costs)
    assert time.bound == "link" and carried(choice, 8 * MIB, 4, costs).link == 7 * MIB // 2
    assert time.transfer_ps == 7 * MIB // 2 * 1000


@pytest.mark.matrix
@pytest.mark.parametrize("names", [("flat_ring",), ("hierarchical", "ring", "ring")])
def test_256_ranks_agree_whatever_the_algorithm(trn1n, names):
    topology = trn1n(8)
    choice = Choice(REDUCE, place(topology, everyone(topology)), names[0], "", *names[1:])
    assert closed_time(choice, MIB, 4, NOMINAL) == schedule_time(choice, MIB, 4, NOMINAL)


def test_4096_ranks_in_three_tiers_of_16():
    """Chips of 16 ranks, instances of 16 chips, 16 instances: one step each way in a chip, four
    between chips and four between instances."""
    machine = torus(
        4,
        4,
        ranks_per_chip=16,
        link_bytes_per_s=128 * 10**9,
        instances=16,
        efa_bytes_per_s=400 * 10**9,
        efa_devices=16,
    )
    layout = place(machine, everyone(machine))
    choice = Choice(REDUCE, layout, "hierarchical", "", "rdh", "recursive")
    assert choice.recipe().sides == (16, 16, 16)
    time = closed_time(choice, MIB, 4, NOMINAL)
    steps = 2 * (1 + 4) * NOMINAL.intra_hop_ps + 2 * 4 * NOMINAL.inter_hop_ps
    assert time.latency_ps == steps and time.algorithm == "hierarchical"


def test_256_ranks_over_8_instances_agree(trn1n):
    topology = trn1n(8)
    for kind in (GATHER, SCATTER, REDUCE):
        for size in (MIB, 8 * MIB):
            choice = choose(kind, topology, everyone(topology), size, 4, NOMINAL)
            assert choice.algorithm == "hierarchical"
            assert closed_time(choice, size, 4, NOMINAL) == schedule_time(choice, size, 4, NOMINAL)


def test_4096_ranks_build_no_schedule(trn1n, monkeypatch):
    def refuse(choice, group=0):
        raise AssertionError("closed form built a schedule")

    monkeypatch.setattr(Choice, "schedule", refuse)
    topology = trn1n(128)
    choice = choose(REDUCE, topology, everyone(topology), MIB, 4, NOMINAL)
    time = closed_time(choice, MIB, 4, NOMINAL)
    hops = 2 * (7 * NOMINAL.inter_hop_ps + NOMINAL.intra_hop_ps)
    assert (time.algorithm, time.latency_ps) == ("hierarchical", hops)
    assert carried(choice, MIB, 4, NOMINAL).efa


def test_groups_across_instances_share_efa_devices(trn1n):
    topology, size = trn1n(2), 16 * MIB
    groups = ReplicaGroups.from_axes({"replicate": 2, "shard": 32}, ["replicate"])
    alone = ReplicaGroups(groups.groups[:1])
    choices = [choose(REDUCE, topology, g, size, 4, NOMINAL) for g in (groups, alone)]
    both, one = (closed_time(choice, size, 4, NOMINAL) for choice in choices)
    assert both.bound == one.bound == "efa"
    # Two ranks of a chip share one of 16 devices.
    assert [carried(choice, size, 4, NOMINAL).efa for choice in choices] == [2 * size, size]
    assert both.transfer_ps == pytest.approx(2 * one.transfer_ps, rel=1e-6)
    rate = 200e9 / 16 * NOMINAL.efa_efficiency
    assert both.transfer_ps == pytest.approx(2 * size / rate * 1e12, rel=1e-6)


def test_trn1_ranks_share_devices_of_two_chips(trn1):
    groups = ReplicaGroups.from_axes({"replicate": 2, "shard": 32}, ["replicate"])
    choice = choose(GATHER, trn1(2), groups, 2 * MIB, 4, NOMINAL)
    # Four ranks per device, each sending its half of 2 MiB
    assert carried(choice, 2 * MIB, 4, NOMINAL).efa == 4 * MIB


def test_groups_inside_instances_share_links(trn1n):
    topology = trn1n()
    groups = ReplicaGroups.from_axes({"a": 4, "b": 8}, ["a"])  # ranks 8 apart: a column of chips
    many, one = (
        carried(choose(GATHER, topology, g, MIB, 4, NOMINAL), MIB, 4, NOMINAL)
        for g in (groups, ReplicaGroups(groups.groups[:1]))
    )
    assert many.link == 2 * one.link  # both cores of a chip use the same wires


def test_instances_do_not_disturb_each_other(trn1n):
    groups = ReplicaGroups.from_axes({"a": 4, "b": 32}, ["b"])
    one = collective_time(REDUCE, trn1n(), everyone(trn1n()), 8 * MIB, 4, NOMINAL)
    many = collective_time(REDUCE, trn1n(4), groups, 8 * MIB, 4, NOMINAL)
    assert many == one
    choice = choose(REDUCE, trn1n(4), groups, 8 * MIB, 4, NOMINAL)
    assert not carried(choice, 8 * MIB, 4, NOMINAL).efa
    assert place(trn1n(4), groups).representatives == (0,)


def test_the_flat_ring_loads_every_efa_device_alike(trn1n, trn1):
    for topology, devices in ((trn1n(4), 16), (trn1(4), 8)):
        choice = Choice(GATHER, place(topology, everyone(topology)), "flat_ring", "")
        size = 128 * 16 * 4096
        time = closed_time(choice, size, 4, NOMINAL)
        bytes_of = carried(choice, size, 4, NOMINAL)
        assert bytes_of.efa == size // 128 * 127 // devices
        # Half of the 16 channels run against the others: 7 of 8 per direction stay inside.
        assert bytes_of.link == size // 128 * 127 // 16 * 8
        assert time.latency_ps == 4 * NOMINAL.inter_hop_ps + 123 * NOMINAL.intra_hop_ps


def test_the_choice_follows_the_thresholds_and_says_why(trn1n):
    one, two, many = trn1n(), trn1n(2), trn1n(32)

    def chosen(topology, size, **settings):
        costs = replace(NOMINAL, **settings)
        return choose(GATHER, topology, everyone(topology), size, 4, costs)

    assert chosen(one, MIB).algorithm == "mesh"
    assert chosen(one, MIB + 4).algorithm == "ring"
    assert "mesh_max_bytes 1048576" in chosen(one, MIB + 4).why
    assert chosen(one, MIB + 4, mesh_max_bytes=2 * MIB).algorithm == "mesh"
    near = chosen(two, 8 * MIB)
    assert (near.algorithm, near.inside, near.across) == ("hierarchical", "ring", "recursive")
    assert "2 instances x 32 ranks" in near.why
    assert chosen(two, 64 * MIB).algorithm == "flat_ring"
    assert chosen(many, 64 * MIB).algorithm == "hierarchical"
    assert "flat ring" in chosen(many, 64 * MIB).why
    assert chosen(trn1n(3), 4096).across == "mesh"
    assert chosen(trn1n(3), 2 * MIB).across == chosen(trn1n(5), 4096).across == "ring"
    assert chosen(two, 2 * MIB, inter_recursive=False).across == "ring"


def test_two_ranks_take_one_step_while_that_is_faster(trn1):
    pair = ReplicaGroups(((0, 1),))
    small, large = (choose(REDUCE, trn1(), pair, size, 4, NOMINAL) for size in (1 << 14, 1 << 19))
    assert (small.algorithm, large.algorithm) == ("single_step_mesh", "mesh")
    assert "single step mesh" in large.why


def test_choices_on_trn2_are_the_documented_ones():
    target = logical(TRN2)
    topology, costs = cluster_topology(target, 1), collective_costs(target, "nominal")
    sizes = {1 << 19: "grouped_mesh", 1 << 23: "rdh", 1 << 27: "kangaring"}
    for size, name in sizes.items():
        assert choose(GATHER, topology, everyone(topology), size, 4, costs).algorithm == name
    lone = ReplicaGroups((tuple(range(0, topology.num_ranks, 4)),))
    choice = choose(GATHER, topology, lone, 1 << 27, 4, costs)
    assert choice.algorithm == "ring" and "one rank per chip, rings 4" in choice.why


def test_full_instances_use_four_rings_and_parts_of_them_two(trn1n):
    groups = ReplicaGroups.from_axes({"a": 4, "b": 8}, ["b"])
    full = choose(GATHER, trn1n(), everyone(trn1n()), 8 * MIB, 4, NOMINAL)
    part = choose(GATHER, trn1n(), groups, 8 * MIB, 4, NOMINAL)
    assert (full.recipe().parts, part.recipe().parts) == (4, 2)
    # Every directed link carries one ring
    assert carried(full, 8 * MIB, 4, NOMINAL).link == 31 * 8 * MIB // 32 // 4


def test_a_permute_costs_one_hop_and_its_bytes(trn1n):
    pairs = [(i, (i + 1) % 8) for i in range(8)]
    groups = ReplicaGroups.from_axes({"a": 4, "b": 8}, ["b"])
    kind = CollectiveKind.COLLECTIVE_PERMUTE
    choice = choose(kind, trn1n(), groups, MIB, 4, NOMINAL, pairs=pairs)
    time = closed_time(choice, MIB, 4, NOMINAL)
    assert time.latency_ps == NOMINAL.intra_hop_ps
    assert carried(choice, MIB, 4, NOMINAL).rank == MIB
    assert time.touch_bytes_per_rank == 2 * MIB


def test_one_rank_costs_nothing(trn1n):
    groups = ReplicaGroups(tuple((i,) for i in range(32)))
    time = collective_time(REDUCE, trn1n(), groups, MIB, 4, NOMINAL)
    assert (time.total_ps, time.algorithm) == (0, "none")


def test_profiles_are_ordered_and_time_adds_up(trn1n):
    topology = trn1n(4)
    for kind in KINDS:
        for size in (64, MIB, 256 * MIB):
            times = [
                collective_time(kind, topology, everyone(topology), size, 4, costs)
                for costs in (PEAK, NOMINAL, CONSERVATIVE)
            ]
            assert sorted(t.total_ps for t in times) == [t.total_ps for t in times]
            for t in times:
                assert t.total_ps == t.launch_ps + t.latency_ps + t.transfer_ps


# Published trn1 rows (nccom-test, 2025): ranks, bytes, microseconds. The first five are mesh sizes
# and were not used to fix any constant; the ring sizes fixed the nominal rates.
PUBLISHED = [
    (8, REDUCE, 65536, 11.6),
    (8, REDUCE, 262144, 23.6),
    (8, REDUCE, 1048576, 70.3),
    (8, REDUCE, 2097152, 86.8),
    (8, REDUCE, 16777216, 466.4),
    (8, REDUCE, 1073741824, 28019.1),
]


@pytest.mark.parametrize(("ranks", "kind", "size", "published_us"), PUBLISHED)
def test_nominal_reproduces_the_published_curve(ranks, kind, size, published_us):
    groups = ReplicaGroups((tuple(range(ranks)),))
    time = collective_time(kind, machine("trn1.32xlarge"), groups, size, 4, NOMINAL)
    assert time.total_ps / US == pytest.approx(published_us, rel=0.11)


def test_bus_bandwidth_uses_the_published_factors():
    assert bus_bytes_per_s(REDUCE, 4, 1000, 10**12) == 1500
    assert bus_bytes_per_s(GATHER, 4, 1000, 10**12) == 750
    assert bus_bytes_per_s(CollectiveKind.COLLECTIVE_PERMUTE, 4, 1000, 10**12) == 1000


def test_misuse_is_refused(trn1n):
    topology = trn1n()
    with pytest.raises(CollectiveError, match="at least one element"):
        collective_time(REDUCE, topology, everyone(topology), 0, 4, NOMINAL)
    with pytest.raises(CollectiveError, match="ranks below 32, got 32"):
        collective_time(REDUCE, topology, ReplicaGroups(((0, 32),)), 64, 4, NOMINAL)
    with pytest.raises(CollectiveError, match="at most once"):
        collective_time(REDUCE, topology, ReplicaGroups(((0, 1), (1, 2))), 64, 4, NOMINAL)
    with pytest.raises(CollectiveError, match="one size"):
        collective_time(REDUCE, topology, ReplicaGroups(((0, 1), (2,))), 64, 4, NOMINAL)
    with pytest.raises(CollectiveError, match="efa_efficiency"):
        replace(NOMINAL, efa_efficiency=1.5)
    with pytest.raises(CollectiveError, match="rank_copy_bytes_per_s > 0"):
        replace(NOMINAL, rank_copy_bytes_per_s=0)
