"""What a step rests on: every fact is accounted for, and moving one moves what reads it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.machine.target import (
    Fact,
    altered,
    facts_of,
    load_target,
    logical,
    target_names,
)
from shardwright.orchestrator.road.timing import step_of
from shardwright.sim_cluster.calibration import Fitted, constants
from shardwright.sim_cluster.profiles import PROFILES
from shardwright.sim_cluster.timing import sensitivity as sensitivity_module
from shardwright.sim_cluster.timing.sensitivity import (
    EFA,
    SHARE,
    TIMED,
    _moved,
    _transfers,
    assumptions,
    sensitivity,
    with_moved,
)
from shardwright.sim_cluster.timing.step_time import Step
from tests.support.small_job import Road

COUNTED = (
    "access_dim_size_max",
    "access_dim_stride_max",
    "access_elements_psum",
    "access_elements_sbuf",
    "access_free_dims",
    "allowed_lnc",
    "chip_bf16_tflops_published",
    "chips_per_instance",
    "collective_mesh",
    "compiler",
    "dma_descriptor_max_bytes",
    "dma_engines",
    "dma_partitions_per_engine",
    "dma_ring_reserve_mb_per_core",
    "efa_devices",
    "hbm_gib_per_chip",
    "host_memory_gib",
    "kangaring",
    "model_code_overhead_mb_per_physical_core",
    "physical_cores_per_chip",
    "physical_cores_per_hbm_bank",
    "price_usd_per_hour_capacity_block",
    "price_usd_per_hour_on_demand",
    "psum_bank_bytes_per_partition",
    "psum_bytes_per_partition",
    "refused_io_types",
    "refused_types",
    "sbuf_bytes_per_partition",
    "sbuf_partitions",
    "semaphores",
    "shape",
    "tensor_bf16_tflops",
    "tensor_contraction_max",
    "tensor_moving_max",
    "tensor_stationary_max",
    "tensor_transpose_max",
    "topology",
)
"""Facts that are not moved: how much there is of something, what is there at all, prices, and what
only code is chosen by."""


def test_every_fact_is_moved_or_said_not_to_be() -> None:
    assert not set(TIMED) & set(COUNTED)
    for name in target_names():
        target = load_target(name)
        assert set(facts_of(target)) <= set(TIMED) | set(COUNTED)
        assert not set(assumptions(target)) & set(COUNTED)


@pytest.mark.parametrize("name", ["trn1n.32xlarge", "trn2.48xlarge", "inf2.xlarge"])
def test_a_machine_altered_in_nothing_is_itself(name: str) -> None:
    target = logical(load_target(name), 0)
    assert altered(target, {}) == target
    half = altered(target, {"dma_fixed_ns": 650})
    assert half == replace(target, core=replace(target.core, dma_fixed_ps=650_000))


@pytest.mark.parametrize(
    ("kinds", "moves"), [([], False), ([False], False), ([False, True], True), ([True], True)]
)
def test_one_transfer_to_the_host_is_enough_for_its_link_to_count(
    kinds: list[bool], moves: bool
) -> None:
    calls = [SimpleNamespace(is_transfer=kind) for kind in kinds]
    program = SimpleNamespace(functions=[SimpleNamespace(collectives=calls)])
    step: Any = SimpleNamespace(programs={"forward": program})
    assert _transfers(step) is moves


@pytest.mark.parametrize("name", target_names())
def test_the_link_to_the_host_counts_where_there_is_one(name: str) -> None:
    target = load_target(name)
    host = "host_link_gb_per_s"
    assert host not in assumptions(target)
    assert (host in assumptions(target, transfers=True)) is (target.host_link_bytes_per_s > 0)


def test_assumptions_have_a_source_and_leave_out_what_is_not_there() -> None:
    found = assumptions(load_target("trn1.32xlarge"))
    assert set(constants()) < set(found)
    assert all(fact.source and fact.status for fact in found.values())
    assert found["efa_hop_us"].status == "inferred"
    assert found["collective_touch"].status == "fitted"
    assert "efa_gbps" in found
    assert not {"efa_gbps", EFA} & set(assumptions(load_target("inf2.48xlarge")))


@pytest.mark.parametrize(
    ("profile", "value"), [("conservative", 0.25), ("nominal", 0.5), ("peak", 0.75)]
)
@pytest.mark.parametrize(
    ("fitted_on", "status", "source"), [("rows", "fitted", "rows"), ("", "unknown", "why")]
)
def test_the_source_of_a_constant_is_what_it_was_fitted_on(
    profile: str,
    value: float,
    fitted_on: str,
    status: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without rows it is what it stands for."""
    given: dict[str, Any] = {
        "value": 0.5,
        "band": (0.25, 0.75),
        "unit": "",
        "mechanism": "why",
        "method": "",
    }
    made = Fitted(name="streaming", fitted_on=fitted_on, **given)
    monkeypatch.setattr(sensitivity_module, "constants", lambda: {"streaming": made})
    found = assumptions(load_target("trn1.32xlarge"), profile)
    assert found["streaming"] == Fact(value, status, source)


@pytest.mark.parametrize(
    ("name", "value", "lower", "higher"),
    [
        ("streaming", 0.5, 0.4, 0.6),
        ("stall_recovery", 0.5, 0.3, 0.7),
        ("stall_recovery", 0.1, 0, 0.3),
    ],
)
def test_figures_are_moved_by_a_fifth(name: str, value: float, lower: float, higher: float) -> None:
    """Of themselves; what is a share of something, by a fifth of all."""
    step: Any = None  # these figures are the cores' alone
    moved = [getattr(credit, name) for _, credit in _moved(step, "nominal", name, value)]
    assert moved == pytest.approx([lower, higher])


@pytest.mark.parametrize(
    ("name", "own", "lower", "higher"),
    [
        (
            "collective_touch",
            {"rank_copy_bytes_per_s": 100, "rank_reduce_bytes_per_s": 50},
            {"rank_copy_bytes_per_s": 80, "rank_reduce_bytes_per_s": 40},
            {"rank_copy_bytes_per_s": 120, "rank_reduce_bytes_per_s": 60},
        ),
        (EFA, {"efa_efficiency": 0.5}, {"efa_efficiency": 0.4}, {"efa_efficiency": 0.6}),
    ],
)
def test_figures_of_the_network_are_moved_by_a_fifth(
    name: str, own: dict[str, float], lower: dict[str, float], higher: dict[str, float]
) -> None:
    """Of what the step itself sets; what else it sets stays."""
    own = {"launch_ps": 7, **own}
    target = load_target("trn1n.32xlarge")
    step = Step(programs={}, schedules=(), mesh={}, target=target, instances=1, collectives=own)
    moved = _moved(step, "nominal", name, 1.0)
    for (other, credit), wanted in zip(moved, (lower, higher), strict=True):
        assert other.collectives == pytest.approx({"launch_ps": 7, **wanted})
        assert (replace(other, collectives=own), credit) == (step, PROFILES["nominal"])


FIELDS = {
    "tensor_clock_ghz": lambda t: t.core.clock_hz["tensor"],
    "compute_latency_cycles": lambda t: t.core.compute_latency_cycles,
    "dma_fixed_ns": lambda t: t.core.dma_fixed_ps,
    "dma_descriptor_extra_bytes": lambda t: t.core.dma_descriptor_extra_bytes,
    "neuronlink_gb_per_s_per_link_per_direction": lambda t: sum(t.link_bytes_per_s),
    "efa_hop_us": lambda t: t.collectives.efa_hop_ps,
    "efa_gbps": lambda t: t.efa_bytes_per_s,
}


@pytest.mark.parametrize("name", target_names())
def test_figures_move_by_the_share_that_is_said(name: str) -> None:
    """Also those that are written as small whole numbers; thresholds in bytes stay whole."""
    target = load_target(name)
    facts = facts_of(target)
    for fact, share in product(FIELDS, (-SHARE, SHARE)):
        moved = FIELDS[fact](with_moved(target, fact, facts[fact].value, share))
        assert moved == pytest.approx(FIELDS[fact](target) * (1 + share), rel=1e-9), fact
    size = target.collectives.mesh_max_bytes
    moved = with_moved(target, "mesh_max_bytes", size, SHARE).collectives.mesh_max_bytes
    assert moved == round(size * (1 + SHARE)) and isinstance(moved, int)
    small = with_moved(target, "compute_latency_cycles", 2, SHARE)
    assert small.core.compute_latency_cycles == 2.4


@pytest.mark.matrix
def test_what_a_step_uses_moves_it_and_nothing_else_does(small_road: Road) -> None:
    """A step of microseconds: transfers and collectives cost what they cost however short."""
    found = sensitivity(step_of(small_road.built, small_road.built.programs))
    moved = {one.name: one for one in found}
    assert moved["dma_fixed_ns"].lower < 0 < moved["dma_fixed_ns"].higher
    assert moved["collective_launch_us"].lower < 0 < moved["collective_launch_us"].higher
    assert moved["streaming"].lower > 0 > moved["streaming"].higher
    recovery = moved["stall_recovery"]  # which may be at an end of its range
    assert recovery.lower >= 0 >= recovery.higher and recovery.most > 0
    # One instance: nothing crosses EFA, and no all-reduce is near a threshold.
    for name in ("efa_gbps", "efa_hop_us", EFA, "flat_ring_min_bytes"):
        assert moved[name].most == 0, name
    order = [one.most for one in found]
    assert order == sorted(order, reverse=True)
