"""Placements permute cores, nothing else; on the torus every axis runs between neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.collectives.groups.cycles import chip_cycles
from shardwright.collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups
from shardwright.collectives.placement import (
    Placement,
    place_mesh,
    read_placement,
    where,
    with_atoms,
)
from shardwright.collectives.select import choose, collective_time
from shardwright.collectives.timing.times import closed_time
from shardwright.collectives.topology import Topology, line, ring, switched, torus
from tests.support.collective_schedules import schedule_time
from tests.support.machines import NOMINAL

WIRED = {"ranks_per_chip": 2, "link_bytes_per_s": 10**9}
KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


def machine(instances: int = 1, ranks_per_chip: int = 2) -> Topology:
    """Instances of 16 chips like those of trn1n (2 cores) and trn2 (4 logical cores)."""
    efa = {"efa_bytes_per_s": 200 * 10**9, "efa_devices": 16} if instances > 1 else {}
    rates = {"link_bytes_per_s": 96 * 10**9, "instances": instances}
    return torus(4, 4, ranks_per_chip=ranks_per_chip, **rates, **efa)


def meshes(cores: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """All meshes of powers of two that fill the cores."""
    powers = [2**k for k in range(cores.bit_length())]
    for sizes in product(powers, repeat=len(axes)):
        if math.prod(sizes) == cores:
            yield dict(zip(axes, sizes, strict=True))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(1, 2), (2, 2), (3, 2), (1, 4), (4, 4)]),
    st.sampled_from(["torus", "linear", "order", "linear:order"]),
    st.randoms(use_true_random=False),
)
def test_every_placement_is_a_permutation_of_the_cores(size, name, random) -> None:
    topology = machine(*size)
    left, mesh = topology.num_ranks, {}
    for axis in ("pp", "dp", "cp", "tp"):
        mesh[axis] = random.choice([n for n in range(1, left + 1) if left % n == 0])
        left //= mesh[axis]
    mesh["ep"] = left
    order = random.sample(list(mesh), len(mesh))
    placed = place_mesh(name.replace("order", ",".join(order)), mesh, topology)
    assert sorted(placed.slots.tolist()) == list(range(topology.num_ranks))
    flat = [core for group in placed.groups(mesh, ("dp", "tp")).groups for core in group]
    assert sorted(flat) == list(range(topology.num_ranks))


def is_ring(cores: tuple[int, ...], topology: Topology) -> bool:
    """Whether the chips of some cores of one instance are one, two neighbours, or close a ring."""
    chips = tuple(np.unique(topology.chip_of(np.asarray(cores))).tolist())
    near = topology.neighbours()
    order = chip_cycles(topology, chips)[0]
    closed = zip(order, (*order[1:], order[0]), strict=True)
    return len(chips) == 1 or all(b in near[a] for a, b in closed)


@pytest.mark.parametrize("ranks_per_chip", [2, 4])
def test_groups_of_every_axis_and_of_inner_axes_together_close_rings(ranks_per_chip: int) -> None:
    topology = machine(1, ranks_per_chip)
    count = 0
    for mesh in meshes(topology.num_ranks, ("dp", "cp", "tp")):
        placed = place_mesh("torus", mesh, topology)
        for axes in (("dp",), ("cp",), ("tp",), ("cp", "tp"), ("dp", "tp")):
            for group in placed.groups(mesh, axes).groups:
                assert is_ring(group, topology), (mesh, axes)
                count += 1
    assert count > 1000


def test_a_step_along_an_axis_is_a_step_between_neighbours() -> None:
    topology = machine()
    near = topology.neighbours()
    for mesh in meshes(32, ("dp", "cp", "tp")):
        placed = place_mesh("torus", mesh, topology)
        for axis in mesh:
            for group in placed.groups(mesh, (axis,)).groups:
                chips = topology.chip_of(np.asarray(group)).tolist()
                for a, b in pairwise(chips):
                    assert a == b or b in near[a], (mesh, axis)


def test_the_inner_axis_fills_chips_before_it_crosses_links() -> None:
    topology = machine(2)
    mesh = {"dp": 8, "tp": 8}
    for name in ("torus", "linear"):
        groups = place_mesh(name, mesh, topology).groups(mesh, ("tp",)).groups
        for group in groups:
            cores = np.asarray(group)
            assert len(set(topology.instance_of(cores).tolist())) == 1
            assert len(set(topology.chip_of(cores).tolist())) == 4


def test_linear_is_the_order_of_the_cores() -> None:
    mesh = {"dp": 4, "tp": 8}
    placed = place_mesh("linear", mesh, machine())
    assert placed.slots.tolist() == list(range(32))
    assert placed.groups(mesh, ("dp",)) == ReplicaGroups.from_axes(mesh, ("dp",))


@pytest.mark.parametrize("mesh", [{"dp": 24, "tp": 4}, {"dp": 96}, {"pp": 3, "dp": 32}])
def test_every_instance_is_laid_out_like_the_first(mesh: dict[str, int]) -> None:
    """32 ranks each, the first axis across the three."""
    slots = place_mesh("torus", mesh, machine(3)).slots.reshape(3, 32)
    assert sorted(slots[0].tolist()) == list(range(32))
    assert (slots - slots[0]).tolist() == [[0] * 32, [32] * 32, [64] * 32]


def test_an_order_puts_its_first_axis_across_instances() -> None:
    topology, mesh = machine(2), {"dp": 16, "tp": 4}
    usual, turned = (place_mesh(n, mesh, topology) for n in ("torus", "tp,dp"))

    def instances(placed: Placement, axis: str) -> int:
        cores = np.asarray(placed.groups(mesh, (axis,)).groups[0])
        return len(set(topology.instance_of(cores).tolist()))

    assert (instances(usual, "dp"), instances(usual, "tp")) == (2, 1)
    assert (instances(turned, "dp"), instances(turned, "tp")) == (1, 2)
    assert turned.order == ("tp", "dp")


@pytest.mark.parametrize(
    ("mesh", "size", "name"),
    [
        ({"dp": 8, "tp": 4}, (1, 2), "torus"),
        ({"dp": 2, "cp": 8, "tp": 2}, (1, 2), "torus"),
        ({"dp": 16, "tp": 4}, (2, 2), "torus"),
        ({"dp": 16, "tp": 4}, (2, 2), "tp,dp"),
        ({"dp": 12, "tp": 8}, (3, 2), "torus"),
        ({"dp": 8, "tp": 8}, (1, 4), "torus"),
    ],
)
def test_closed_times_are_those_of_the_schedules(
    mesh: Mapping[str, int], size: tuple[int, int], name: str
) -> None:
    topology = machine(*size)
    placed = place_mesh(name, mesh, topology)
    for axis in mesh:
        groups = placed.groups(mesh, (axis,))
        for kind, nbytes in product(KINDS, (1 << 14, 1 << 22)):
            choice = choose(kind, topology, groups, nbytes, 2, NOMINAL)
            exact = schedule_time(choice, nbytes, 2, NOMINAL)
            assert closed_time(choice, nbytes, 2, NOMINAL) == exact, (axis, kind, nbytes)


def seconds(name: str, mesh: Mapping[str, int], axis: str) -> float:
    groups = place_mesh(name, mesh, machine()).groups(mesh, (axis,))
    kind = CollectiveKind.ALL_GATHER
    return collective_time(kind, machine(), groups, 1 << 26, 2, NOMINAL).total_ps / 1e12


def test_strided_groups_are_faster_on_the_torus() -> None:
    """Eight chips two apart share links three deep; as neighbours they have their own."""
    mesh = {"dp": 8, "tp": 4}
    assert seconds("torus", mesh, "dp") < 0.35 * seconds("linear", mesh, "dp")
    assert seconds("torus", mesh, "tp") == seconds("linear", mesh, "tp")


def test_what_does_not_divide_is_linear_and_says_why() -> None:
    topology = machine(3)
    placed = place_mesh("torus", {"dp": 32, "tp": 3}, topology)
    assert placed.slots.tolist() == list(range(96))
    assert "do not divide" in placed.why and placed.kind == "linear"
    divided = {"dp": 12, "tp": 8}
    for name, kind in (("torus", "torus"), ("dp,tp", "torus"), ("linear", "linear")):
        assert place_mesh(name, divided, topology).kind == kind
    assert "neighbouring chips" in place_mesh("torus", divided, topology).why


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        (machine(3), "the axes do not divide into the torus"),
        (ring(12, **WIRED), "the chips of an instance form a ring, no torus"),
        (line(6, **WIRED), "the chips of an instance form a line, no torus"),
        (
            switched(12, [(12, 10**9)], ranks_per_chip=2),
            "the chips of an instance are behind switches, no torus",
        ),
        (
            ring(4, instances=3, efa_bytes_per_s=10**9, efa_devices=4, **WIRED),
            "the axes do not divide into the chips of an instance",
        ),
        (torus(3, 4, **WIRED), "a torus of 3 x 4 chips of 2 cores is no hypercube"),
    ],
)
def test_what_is_not_laid_out_on_a_torus_says_what_the_machine_has(
    topology: Topology, why: str
) -> None:
    mesh = {"dp": topology.num_ranks // 3, "tp": 3}
    placed = place_mesh("torus", mesh, topology)
    assert (placed.kind, placed.why) == ("linear", f"cores in the order of their numbers: {why}")


def test_where_an_axis_lies_in_words() -> None:
    mesh, topology = {"dp": 8, "tp": 4}, machine()
    torus_, linear = (place_mesh(n, mesh, topology) for n in ("torus", "linear"))
    assert where(torus_, mesh, ("dp",)) == "a ring through 8 chips"
    assert where(linear, mesh, ("dp",)) == "8 chips apart"
    assert where(torus_, mesh, ("tp",)) == "2 neighbours"
    assert where(torus_, mesh, ("dp", "tp")) == "2 rings through 16 chips"
    many = {"dp": 128, "tp": 2}
    assert where(place_mesh("torus", many, machine(8)), many, ("dp",)) == (
        "2 rings through 16 chips in each of 8 instances"
    )
    assert where(place_mesh("torus", many, machine(8)), many, ("tp",)) == "1 chip"


@pytest.mark.parametrize("name", ["ring", "tp", "tp,dp,dp", "tp,cp", "linear:tp", "snake:dp,tp"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(CollectiveError, match="requires torus, linear, or the axes dp, tp"):
        place_mesh(name, {"dp": 8, "tp": 4}, machine())


def test_axes_of_one_core_need_no_place() -> None:
    mesh = {"pp": 1, "dp": 8, "tp": 4}
    short, full = (place_mesh(n, mesh, machine()) for n in ("tp,dp", "tp,pp,dp"))
    assert short.slots.tolist() == full.slots.tolist()


def test_an_axis_that_was_cut_is_named_by_its_parts() -> None:
    parts = {"tp": ("tp_0", "tp_1"), "dp": ("dp",), "cp": ()}
    assert with_atoms("torus", parts.__getitem__) == "torus"
    assert with_atoms("tp,cp,dp", parts.__getitem__) == "torus:tp_0,tp_1,dp"
    assert with_atoms("linear:tp,dp", parts.__getitem__) == "linear:tp_0,tp_1,dp"
    assert read_placement("linear: tp , dp") == ("linear", ("tp", "dp"))
