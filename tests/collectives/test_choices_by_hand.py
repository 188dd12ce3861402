"""Groups of mesh axes, and what there is to choose from for a collective, written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.groups.layout import place
from shardwright.collectives.ops import (
    CollectiveError,
    CollectiveKind,
    ReplicaGroups,
    axis_strides,
    group_index,
)
from shardwright.collectives.select import alternatives, choose, full_name
from shardwright.collectives.topology import Topology, line, ring, switched, torus, unlinked
from tests.support.machines import wiring

GATHER, REDUCE = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE
MIB = 1_048_576

COSTS = CollectiveCosts(
    profile="by hand",
    launch_ps=1000,
    intra_hop_ps=100,
    inter_hop_ps=5000,
    rank_copy_bytes_per_s=10**12,
    rank_reduce_bytes_per_s=10**12,
    rank_hbm_bytes_per_s=10**15,
    efa_efficiency=0.5,
    mesh_max_bytes=10**9,
    rdh_max_bytes=10**9,
    kangaring=True,
)
MESH = {"a": 2, "b": 3, "c": 4}


def test_groups_over_axes_of_a_mesh() -> None:
    """Rank = 12 a + 4 b + c. Over a and c at b = 1: 4..7 and 16..19."""
    assert axis_strides(MESH) == {"a": 12, "b": 4, "c": 1}
    over = ReplicaGroups.from_axes(MESH, ["c", "a"]).groups
    assert over[1] == (4, 5, 6, 7, 16, 17, 18, 19) and len(over) == 3
    assert ReplicaGroups.from_axes(MESH, ["b"]).groups[5] == (13, 17, 21)
    assert ReplicaGroups.from_axes(MESH, []).groups[23] == (23,)
    with pytest.raises(CollectiveError, match=r"got \['d'\]"):
        ReplicaGroups.from_axes(MESH, ["a", "d"])


def test_the_position_in_a_group() -> None:
    """Rank 18 is a = 1, b = 1, c = 2: over a and c 1 * 4 + 2, over c and a 2 * 2 + 1."""
    assert group_index(MESH, ["a", "c"], 18) == 6
    assert group_index(MESH, ["c", "a"], 18) == 5
    assert [group_index(MESH, ["b"], rank) for rank in (3, 4, 11, 23)] == [0, 1, 2, 2]
    assert group_index(MESH, [], 18) == 0


def grid(instances: int = 1, per_chip: int = 4) -> Topology:
    tier = {"efa_bytes_per_s": 10**12, "efa_devices": 1} if instances > 1 else {}
    return torus(
        2, 2, ranks_per_chip=per_chip, link_bytes_per_s=10**12, instances=instances, **tier
    )


def everyone(there: Topology) -> ReplicaGroups:
    return ReplicaGroups((tuple(range(there.num_ranks)),))


def names(kind: CollectiveKind, there: Topology, groups: ReplicaGroups | None = None) -> set[str]:
    return set(alternatives(kind, there, groups or everyone(there), MIB, COSTS))


def test_what_else_could_be_used_inside_an_instance() -> None:
    """Four chips of four ranks have everything; of two ranks no KangaRing; one chip nothing between
    chips; two ranks a single step."""
    assert names(GATHER, grid()) == {"mesh", "rdh", "kangaring", "ring"}
    assert names(GATHER, grid(per_chip=2)) == {"mesh", "rdh", "ring"}
    assert names(GATHER, unlinked(ranks_per_chip=4)) == {"mesh", "kangaring", "ring"}
    part = ReplicaGroups(((0, 1, 2, 3),))
    assert names(GATHER, unlinked(ranks_per_chip=8), part) == {"mesh", "ring"}
    six = torus(2, 3, ranks_per_chip=2, link_bytes_per_s=10**12)
    assert names(GATHER, six) == {"mesh", "ring"}
    pair = unlinked(ranks_per_chip=2)
    assert names(REDUCE, pair) == {"mesh", "ring", "single step mesh"}
    assert names(GATHER, pair) == {"mesh", "ring"}
    assert names(REDUCE, unlinked(ranks_per_chip=3)) == {"mesh", "ring"}


def test_doubling_needs_the_same_way_everywhere_in_a_step() -> None:
    """Chips in the order 0, 1, 3, 2: from 0 to 3 is one link of a ring of four and three of a line,
    from 1 to 2 one of either. Of a ring of eight, 0 and 7 are neighbours, 1 and 6 three apart."""
    for there, doubled in (
        (ring(4, ranks_per_chip=2, link_bytes_per_s=10**12), True),
        (line(4, ranks_per_chip=2, link_bytes_per_s=10**12), False),
        (line(2, ranks_per_chip=1, link_bytes_per_s=10**12), True),
        (ring(8, ranks_per_chip=2, link_bytes_per_s=10**12), False),
        (ring(6, ranks_per_chip=2, link_bytes_per_s=10**12), False),
    ):
        assert ("rdh" in names(GATHER, there)) == doubled, there


def test_what_else_could_be_used_across_instances() -> None:
    inside = ("mesh", "rdh", "kangaring", "ring")
    found = names(REDUCE, grid(2))
    assert "flat ring" in found
    assert {f"hierarchical ({i} inside, recursive across)" for i in inside} < found
    # A mesh across only with a mesh inside.
    meshes = {name for name in found if name.endswith(" mesh across)")}
    assert meshes == {"hierarchical (mesh inside, mesh across)"}
    assert "flat ring" in alternatives(REDUCE, grid(2), everyone(grid(2)), 1, COSTS)  # a byte
    lone = ReplicaGroups(((0, 16),))  # one rank of each: a ring through both is a ring across
    assert "flat ring" not in names(REDUCE, grid(2), lone)


def test_groups_over_other_numbers_of_chips_are_no_grid() -> None:
    """Four ranks to a chip: one chip and two chips have other rings."""
    assert place(grid(), ReplicaGroups(((0, 1), (4, 5)))).grid is not None
    assert place(grid(), ReplicaGroups(((0, 1), (2, 4)))).grid is None


def test_nothing_to_choose_from() -> None:
    there = grid(2)
    for kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.COLLECTIVE_PERMUTE):
        assert names(kind, there) == set()
    assert names(REDUCE, there, ReplicaGroups(((0,), (1,)))) == set()
    uneven = ReplicaGroups(((0, 1, 16),))
    assert names(REDUCE, there, uneven) == set()
    choice = choose(REDUCE, there, uneven, MIB, 4, COSTS)
    assert choice.algorithm == "ring" and choice.why.endswith("ring in rank order")
    both = ((0, 1), (1, 0))
    permute = CollectiveKind.COLLECTIVE_PERMUTE
    choice = choose(permute, there, everyone(there), MIB, 4, COSTS, pairs=both)
    assert (choice.algorithm, choice.pairs) == ("direct", both)
    choice = choose(CollectiveKind.ALL_TO_ALL, there, everyone(there), MIB, 4, COSTS)
    assert choice.algorithm == "pairwise" and "inside one instance only" in choice.why
    one = grid()
    choice = choose(CollectiveKind.ALL_TO_ALL, one, everyone(one), MIB, 4, COSTS)
    assert choice.why == "all_to_all is one mesh step"


def test_the_faster_one_is_taken_and_the_others_are_named() -> None:
    """Two ranks, 4096 B: in one step 1000 + 100 + 4096 ps, in two 1000 + 200 + 2 * 2048."""
    pair, groups = unlinked(ranks_per_chip=2), ReplicaGroups(((0, 1),))
    choice = choose(REDUCE, pair, groups, 4096, 4, replace(COSTS, launch_ps=10**9))
    assert choice.algorithm == "single_step_mesh"
    assert choice.why.endswith("two; 1000.0 us, mesh 1000.0 us")
    slow = replace(COSTS, rank_reduce_bytes_per_s=10**11)
    choice = choose(REDUCE, pair, groups, 4096, 4, slow)
    assert choice.algorithm == "mesh" and "single step mesh 0.0 us" in choice.why
    there = grid(4)
    choice = choose(REDUCE, there, everyone(there), 4096, 4, COSTS)
    assert "4 instances x 16 ranks: mesh inside, mesh across" in choice.why
    assert "hierarchical (recursive across)" in choice.why
    assert full_name(choice) == "hierarchical (mesh inside, mesh across)"


def test_settings_that_are_not_given() -> None:
    """A flat mesh up to 1 MiB, rings beyond; doubling across instances, meshes across four."""
    bare = CollectiveCosts(
        profile="p",
        launch_ps=0,
        intra_hop_ps=0,
        inter_hop_ps=0,
        rank_copy_bytes_per_s=1,
        rank_reduce_bytes_per_s=1,
        rank_hbm_bytes_per_s=1,
        efa_efficiency=1.0,
    )
    found = (bare.mesh, bare.mesh_max_bytes, bare.rdh_max_bytes, bare.kangaring)
    assert found == ("flat", 1_048_576, 0, False)
    assert (bare.flat_ring_min_bytes, bare.inter_mesh_max_instances) == (0, 4)
    assert bare.inter_recursive
    with pytest.raises(CollectiveError, match="rank_copy_bytes_per_s > 0, got 0"):
        replace(bare, rank_copy_bytes_per_s=0)
    with pytest.raises(CollectiveError, match="launch_ps >= 0, got -1"):
        replace(bare, launch_ps=-1)


GB = 10**9


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: switched(4, [], ranks_per_chip=1), r"up to all 4 chips, got \[\]"),
        (lambda: switched(4, [(2, GB)], ranks_per_chip=1), r"all 4 chips, got \[2\]"),
        (lambda: switched(12, [(4, GB), (6, GB), (12, GB)], ranks_per_chip=1), "divide each other"),
        (lambda: torus(2, 0, ranks_per_chip=1, link_bytes_per_s=GB), "'chips': 0"),
        (lambda: torus(2, 2, ranks_per_chip=0, link_bytes_per_s=GB), "'ranks_per_chip': 0"),
        (lambda: torus(2, 2, ranks_per_chip=1, link_bytes_per_s=0), "'link_bytes_per_s': 0"),
        (lambda: torus(2, 2, ranks_per_chip=1, link_bytes_per_s=(GB, 0)), "'link_bytes_per_s': 0"),
        (lambda: torus(2, 2, ranks_per_chip=1, link_bytes_per_s=(GB,)), "torus of 2 sides"),
        (lambda: unlinked(ranks_per_chip=1, instances=0), "'instances': 0"),
        (lambda: unlinked(ranks_per_chip=1, efa_devices=1), "got 1 devices and 0 B/s"),
        (lambda: unlinked(ranks_per_chip=1, efa_bytes_per_s=1), "got 0 devices and 1 B/s"),
        (lambda: unlinked(ranks_per_chip=1, efa_devices=-1), "got -1 devices and 0 B/s"),
        (lambda: unlinked(ranks_per_chip=1, efa_devices=-1, efa_bytes_per_s=-1), "got -1"),
    ],
)
def test_no_such_network(make: Callable[[], Topology], text: str) -> None:
    with pytest.raises(CollectiveError, match=text):
        make()


def test_networks_in_a_line() -> None:
    """A ring of 2 has one link each way; a chip alone needs no rate; of 10^12 B/s one device."""
    one: dict[str, Any] = {"ranks_per_chip": 1, "link_bytes_per_s": GB}
    assert wiring(ring(2, **one)) == "ring: 1 x 2 chips x 1 ranks, 2 directed links"
    assert wiring(unlinked(ranks_per_chip=1)) == "unlinked: 1 x 1 chips x 1 ranks, 0 directed links"
    assert wiring(grid(3)) == ("torus: 3 x 4 chips x 4 ranks, 8 directed links, EFA 1000 GB/s each")
    levels = [(2, GB), (4, GB)]
    there = switched(4, levels, ranks_per_chip=2)
    assert wiring(there) == "switch: 1 x 4 chips x 2 ranks, 16 directed links"
    assert there.neighbours() == {n: tuple(c for c in range(4) if c != n) for n in range(4)}
    assert line(3, **one).neighbours() == {0: (1,), 1: (0, 2), 2: (1,)}
    with pytest.raises(CollectiveError, match="got torus without EFA devices"):
        torus(2, 2, instances=2, **one).route(np.array([0]), np.array([5]))
