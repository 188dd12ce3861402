"""trn1n is trn1 with faster links and EFA: nothing takes longer on it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.timing.evaluate import Segment
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import step_of
from shardwright.orchestrator.road.units import unit_service
from shardwright.sim_cluster.network.network import Network
from shardwright.sim_cluster.profiles import PROFILES
from shardwright.sim_cluster.timing.classes import refine
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.macro import MacroOp, Start, Stretch, Wait
from shardwright.sim_cluster.timing.run_timing import ClusterLoop
from shardwright.sim_cluster.timing.step_time import time_step
from tests.support.cells import long_in_matrix

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = tuple(1 << n for n in range(6, 31, 3))  # elements of the larger side
COMPILED = (("llama2-7b", 16), ("llama2-70b", 1), ("llama2-70b", 4))
"""FSDP steps of a preset on a number of instances."""
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


LAYERS = 4
WEIGHTS = (1 << 14, 1 << 20, 1 << 25)  # elements of a layer


def _layers(elements: int, ranks: int, code_ps: int, half: float, ahead: bool) -> list[MacroOp]:
    """Layers that gather two weights each, for themselves or for the next one, and reduce the
    gradient of the one before; code between that moves data, one function of it.
    """
    gather = _call("all_gather", ("dp",), ranks, max(elements, ranks))
    scatter = _call("reduce_scatter", ("dp",), ranks, max(elements, ranks))
    demand = Demand(2 * (1 - 1 / half), hbm=1 - 1 / half)
    codes = [
        Stretch(ps, round(ps * half), ps // 2, Segment("compute", ps), "layer", demand=demand)
        for ps in (code_ps, 3 * code_ps)
    ]
    before: list[MacroOp] = [Start(gather, 0), Start(gather, 1)]
    ops: list[MacroOp] = [*before, Wait(0), Wait(1)] if ahead else []
    for layer in range(LAYERS):
        reduction: list[MacroOp] = [Start(scatter, 2)] if layer else []
        ops += [*before, *reduction, codes[0], *([] if ahead else [Wait(0)]), codes[1]]
        ops += [Wait(1), *([Wait(0)] if ahead else []), codes[0], *([Wait(2)] if layer else [])]
    return ops


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("instances", [1, 4, 16, 64])
def test_no_step_of_gathers_and_scatters_is_slower(instances: int, profile: str) -> None:
    """Whether collectives are hidden behind code or not, and however much they cost that code."""
    mesh = {"dp": 32 * instances}
    targets = [load_target(name) for name in ("trn1n.32xlarge", "trn1.32xlarge")]
    networks = [Network(target, instances, mesh, profile) for target in targets]
    classes = refine(mesh, [("dp",)], [0] * mesh["dp"])
    grid = product(WEIGHTS, (0.1, 1.0, 10.0), (1.0, 1.4, 2.0), (False, True))
    for elements, longer, half, ahead in grid:
        call = _call("all_gather", ("dp",), mesh["dp"], max(elements, mesh["dp"]))
        code_ps = round(networks[0].duration(call).duration_ps * longer)
        ends = [
            ClusterLoop(
                classes,
                [_layers(elements, mesh["dp"], code_ps, half, ahead)],
                lambda call, _, network=network: network.duration(call),
            )
            .run()[0]
            .end_ps
            for network in networks
        ]
        assert ends[0] <= ends[1] * (1 + 1e-6), (elements, longer, half, ahead)


def _compare(preset: str, instances: int) -> dict[str, float]:
    """How much longer a compiled FSDP step takes on trn1, per profile."""
    job = load(None, [f"model.preset={preset}", f"cluster.instances={instances}"])
    with unit_service(job, None) as service:
        built = build(job, service, Stages())
        step = step_of(built, built.programs)
    other = replace(step, target=load_target("trn1.32xlarge"))
    return {p: time_step(other, p).step_time_ps / time_step(step, p).step_time_ps for p in PROFILES}


@pytest.mark.parametrize(("preset", "instances"), long_in_matrix(COMPILED, (), COMPILED))
def test_no_compiled_fsdp_step_is_slower(preset: str, instances: int) -> None:
    ratios = _compare(preset, instances)
    assert min(ratios.values()) >= 1 - 1e-5, ratios
