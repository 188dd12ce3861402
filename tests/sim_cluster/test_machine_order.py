"""trn1n is trn1 with faster links and EFA: nothing takes longer on it."""

from __future__ import annotations

import pytest

from compiler.dtypes import DType
from compiler.isa.program import CollectiveCall
from compiler.target import load_target
from sim_cluster.network import Network
from sim_cluster.profiles import PROFILES

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = tuple(1 << n for n in range(6, 31, 3))  # elements of the larger side
MESHES = (
    (1, {"dp": 32}, ("dp",)),
    (1, {"dp": 4, "tp": 8}, ("tp",)),
    (1, {"dp": 4, "tp": 8}, ("dp",)),
    (4, {"dp": 128}, ("dp",)),
    (4, {"dp": 16, "tp": 8}, ("dp",)),
    (4, {"dp": 4, "tp": 32}, ("tp",)),
    (16, {"dp": 512}, ("dp",)),
    (64, {"pp": 4, "dp": 512}, ("pp",)),
    (64, {"pp": 4, "dp": 512}, ("dp",)),
    (512, {"rep": 32, "dp": 512}, ("rep",)),
)


def _call(kind: str, axes: tuple[str, ...], group: int, elements: int) -> CollectiveCall:
    source = elements // group if kind == "all_gather" else elements
    reduction = "add" if "reduce" in kind else ""
    return CollectiveCall(kind, axes, DType.BF16, (1, max(1, source), 1), reduction)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("instances", "mesh", "axes"), MESHES)
def test_no_collective_is_slower(
    instances: int, mesh: dict[str, int], axes: tuple[str, ...], profile: str
) -> None:
    new, old = (
        Network(load_target(name), instances, mesh, profile)
        for name in ("trn1n.32xlarge", "trn1.32xlarge")
    )
    group = new.groups(axes).size
    faster = 0
    for kind in KINDS:
        for elements in SIZES:
            call = _call(kind, axes, group, max(elements, group))
            times = new.duration(call).duration_ps, old.duration(call).duration_ps
            assert times[0] <= times[1], (kind, elements)
            faster += times[0] < times[1]
    assert faster or profile == "conservative" or instances == 1
