from __future__ import annotations

import numpy as np
import pytest

from shardwright.collectives.groups.cycles import chip_cycles, edge_disjoint_pair
from shardwright.collectives.ops import CollectiveError
from shardwright.collectives.topology import line, ring, torus, unlinked
from tests.support.machines import wiring

# The pair the machine fact sheet prints for the 4x4 torus.
SHEET = (
    (0, 12, 8, 4, 7, 3, 15, 11, 10, 6, 2, 14, 13, 9, 5, 1),
    (0, 3, 2, 1, 13, 12, 15, 14, 10, 9, 8, 11, 7, 6, 5, 4),
)


def edges(cycle):
    return {frozenset((a, b)) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)}


def wires(topology):
    return {frozenset((a, b)) for a, near in topology.neighbours().items() for b in near}


def grid(rows, cols):
    return torus(rows, cols, ranks_per_chip=1, link_bytes_per_s=1)


def test_the_torus_has_64_directed_links_and_documented_neighbours(trn1n):
    topology = trn1n()
    assert len(wires(topology)) == 32 and int((~topology.is_efa).sum()) == 64
    assert topology.neighbours()[0] == (1, 3, 4, 12)
    assert topology.chip_of(np.array([0, 1, 2, 31])).tolist() == [0, 0, 1, 15]


@pytest.mark.parametrize("pair", [SHEET, None], ids=["sheet", "search"])
def test_two_edge_disjoint_cycles_cover_all_32_links(trn1n, pair):
    topology = trn1n()
    first, second = pair or chip_cycles(topology, tuple(range(16)))
    assert sorted(first) == sorted(second) == list(range(16))
    assert not edges(first) & edges(second)
    assert edges(first) | edges(second) == wires(topology)


@pytest.mark.parametrize(("rows", "cols"), [(3, 3), (3, 5), (4, 6), (5, 4), (8, 8)])
def test_the_search_finds_pairs_on_other_tori(rows, cols):
    topology = grid(rows, cols)
    pair = edge_disjoint_pair(topology.neighbours())
    assert pair is not None
    assert not edges(pair[0]) & edges(pair[1]) and edges(pair[0]) <= wires(topology)
    assert len(edges(pair[0]) | edges(pair[1])) == 2 * rows * cols


@pytest.mark.parametrize("chips", [(0, 1, 2, 3), tuple(range(8)), (0, 4, 8, 12), (0, 1, 4, 5)])
def test_documented_chip_groups_have_a_cycle_of_links(trn1n, chips):
    (cycle,) = chip_cycles(trn1n(), chips)
    assert sorted(cycle) == sorted(chips)
    assert edges(cycle) <= wires(trn1n())


def test_chips_that_are_not_neighbours_still_get_an_order(trn1n):
    (order,) = chip_cycles(trn1n(), (0, 2, 8, 10))
    assert sorted(order) == [0, 2, 8, 10]


def test_routes_are_shortest_and_connected(trn1n):
    topology = trn1n()
    for a in range(16):
        for b in range(16):
            links = [i for i in topology.routes[a, b].tolist() if i >= 0]
            chips = [a] + [int(topology.link_target[i]) for i in links]
            assert [int(topology.link_source[i]) for i in links] == chips[:-1]
            assert chips[-1] == b
            row, col = abs(a // 4 - b // 4), abs(a % 4 - b % 4)
            assert len(links) == min(row, 4 - row) + min(col, 4 - col)


def test_ties_go_upwards_along_the_row_first(trn1n):
    topology = trn1n()
    for target, through in ((2, [1, 2]), (8, [4, 8]), (10, [1, 2, 6, 10]), (3, [3])):
        links = [i for i in topology.routes[0, target].tolist() if i >= 0]
        assert [int(topology.link_target[i]) for i in links] == through


def test_line_and_ring_differ_in_the_closing_link():
    ends = (np.array([0]), np.array([5]))
    assert (line(6, ranks_per_chip=1, link_bytes_per_s=1).route(*ends) >= 0).sum() == 5
    assert (ring(6, ranks_per_chip=1, link_bytes_per_s=1).route(*ends) >= 0).sum() == 1


def test_moves_between_instances_use_the_devices_of_both_chips(trn1):
    topology = trn1(2)
    (route,) = topology.route(np.array([6]), np.array([32 + 31])).tolist()
    used = [i for i in route if i >= 0]
    assert used == [int(topology.efa_out[3]), topology.num_links + int(topology.efa_in[15])]
    assert topology.bytes_per_s[used[0]] == 12_500_000_000


def test_an_efa_device_is_at_the_first_of_its_chips(trn1):
    """8 devices for 16 chips: one for two neighbours."""
    topology = trn1(2)
    first = [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14]
    assert topology.link_source[topology.efa_out].tolist() == first
    assert topology.link_target[topology.efa_in].tolist() == first
    assert set(topology.link_target[topology.efa_out].tolist()) == {-1}
    assert set(topology.link_source[topology.efa_in].tolist()) == {-1}


def test_without_efa_instances_cannot_talk():
    topology = unlinked(ranks_per_chip=2, instances=2)
    with pytest.raises(CollectiveError, match="require EFA"):
        topology.route(np.array([0]), np.array([2]))


@pytest.mark.parametrize(
    "wrong", [{"ranks_per_chip": 0}, {"instances": 0}, {"efa_devices": 2}, {"link_bytes_per_s": 0}]
)
def test_impossible_machines_are_refused(wrong):
    with pytest.raises(CollectiveError, match="require"):
        torus(2, 2, **({"ranks_per_chip": 1, "link_bytes_per_s": 1} | wrong))


def test_equal_numbers_give_one_object(trn1n):
    assert trn1n(2) is trn1n(2) and trn1n(2) is not trn1n(1)
    assert "64 directed links" in wiring(trn1n()) and "200 GB/s" in wiring(trn1n())


def test_one_chip_has_no_links_and_needs_no_rate():
    topology = torus(1, 1, ranks_per_chip=2, link_bytes_per_s=0)
    (route,) = topology.route(np.array([0]), np.array([1])).tolist()
    assert topology.num_links == 0 and max(route) == -1
