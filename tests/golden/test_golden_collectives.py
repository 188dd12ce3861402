"""Golden times of collectives: every algorithm that some setting would choose, on every kind of
network, for groups that lie on it in different ways.

A row holds what was chosen and why it takes that long, and the time of every other algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from shardwright.collectives.ops import CollectiveKind, ReplicaGroups
from shardwright.collectives.select import alternatives, choose, full_name
from shardwright.collectives.timing.times import closed_time, wires_ps
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import Target, load_target, logical
from shardwright.sim_cluster.network.collective_costs import collective_costs
from shardwright.sim_cluster.profiles import NAMES
from tests.golden.files import golden
from tests.golden.record import Record, sha

KIB = 1024
SIZES = (4 * KIB, 256 * KIB, 96 * KIB * KIB)
ELEMENT_BYTES = 4
KINDS = tuple(CollectiveKind)
TARGETS = (
    "inf1.6xlarge",
    "inf2.24xlarge",
    "inf2.48xlarge",
    "trn1.2xlarge",
    "trn1.32xlarge",
    "trn1n.32xlarge",
    "trn2.48xlarge",
    "trn3-gen1-ultraserver",
)
INSTANCES = (2, 5)
"""Across instances: few enough for a mesh between them, and more."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups of cores on some instances of a machine."""

    name: str
    instances: int
    groups: ReplicaGroups


def layouts(target: Target) -> Iterator[Layout]:
    """All cores of an instance; neighbours; every fourth core; all cores of several instances, and
    those with the same number on each of them."""
    cores = target.cores
    yield Layout("instance", 1, ReplicaGroups((tuple(range(cores)),)))
    if cores > 4:
        near = tuple(tuple(range(low, low + cores // 4)) for low in range(0, cores, cores // 4))
        yield Layout("quarters", 1, ReplicaGroups(near))
        far = tuple(tuple(range(first, cores, 4)) for first in range(4))
        yield Layout("every fourth", 1, ReplicaGroups(far))
    for count in INSTANCES if target.efa_devices else ():
        every = range(cores * count)
        yield Layout(f"{count} instances", count, ReplicaGroups((tuple(every),)))
        same = tuple(tuple(every[first::cores]) for first in range(cores))
        yield Layout(f"same on {count}", count, ReplicaGroups(same))


def _time_rows(target: Target, layout: Layout, profile: str) -> Iterator[tuple[str, Any]]:
    topology = cluster_topology(target, layout.instances)
    costs = collective_costs(target, profile)
    ring = tuple((n, (n + 1) % layout.groups.size) for n in range(layout.groups.size))
    for kind in KINDS:
        pairs = ring if kind is CollectiveKind.COLLECTIVE_PERMUTE else ()
        for size in SIZES:
            asked = (kind, topology, layout.groups, size)
            choice = choose(*asked, ELEMENT_BYTES, costs, pairs=pairs)
            time = closed_time(choice, size, ELEMENT_BYTES, costs)
            wires = wires_ps(choice, size, ELEMENT_BYTES, costs)
            others = alternatives(*asked, costs)
            row: dict[str, Any] = {
                "chosen": full_name(choice),
                "total_ps": time.total_ps,
                "latency_ps": time.latency_ps,
                "phases_ps": time.phases_ps,
                "bound": time.bound,
                "touch": time.touch_bytes_per_rank,
                "wires": sha(repr(wires).encode(), 12),
                "others": {
                    name: closed_time(other, size, ELEMENT_BYTES, costs).total_ps
                    for name, other in others.items()
                    if name != full_name(choice)
                },
            }
            yield f"{kind.value} {size // KIB} KiB", row


def recorded(target: Target) -> Record:
    """Rows of a machine: under the nominal profile, and on whole instances under the others."""
    found: Record = {}
    for layout in layouts(target):
        profiles = NAMES if layout.name == "instance" else ("nominal",)
        for profile in profiles:
            found[f"{layout.name}, {profile}"] = dict(_time_rows(target, layout, profile))
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_collectives_take_as_long_as_their_golden_file_says(
    name: str, request: pytest.FixtureRequest
) -> None:
    golden(f"collectives/{name}", recorded(logical(load_target(name))), request)
