"""Faults: what degraded links cost, what a dead core does, what jitter draws."""

from __future__ import annotations

import statistics
from contextlib import nullcontext

import pytest

from shardwright.collectives.ops import CollectiveKind, ReplicaGroups
from shardwright.collectives.select import choose
from shardwright.collectives.timing.times import closed_time
from shardwright.collectives.topology import Topology
from shardwright.compiler.diagnostics import SimulationError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import load_target
from shardwright.sim_cluster.network.collective_costs import collective_costs
from shardwright.sim_cluster.network.network import Network
from shardwright.sim_cluster.timing.classes import refine
from shardwright.sim_cluster.timing.degraded import degraded, pattern_of
from shardwright.sim_cluster.timing.faults import (
    Delay,
    Faults,
    Link,
    check_faults,
    ranges,
    waiting,
)
from shardwright.sim_cluster.timing.hardware import FAULT_CLASSES, heard_of
from shardwright.sim_cluster.timing.macro import Mark, Start, Wait
from shardwright.sim_cluster.timing.step_time import Ranks, Step
from tests.sim_cluster.test_cluster_oracle import on_trn1n
from tests.support.collective_schedules import schedule_time

PATTERNS: dict[str, dict[Link, float]] = {
    "slow link": {(0, 1): 0.5},
    "dead link": {(5, 6): 0.0},
    "two dead links of a chip": {(0, 1): 0.0, (0, 4): 0.0},
    "slow device": {("efa", 2): 0.3},
    "dead device": {("efa", 15): 0.0},
}
KINDS = [CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER]


NOMINAL = collective_costs(load_target("trn1n.32xlarge"), "nominal")


def machines(instances: int = 2) -> Topology:
    return cluster_topology(load_target("trn1n.32xlarge"), instances)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_closed_forms_equal_schedules_on_degraded_machines(kind: CollectiveKind, name: str) -> None:
    healthy = machines()
    topology = degraded(healthy, pattern_of(PATTERNS[name]))
    groups = ReplicaGroups((tuple(range(topology.num_ranks)),))
    slower = 0
    for size in (1 << 14, 1 << 22, 1 << 28):
        choice = choose(kind, topology, groups, size, 4, NOMINAL)
        closed = closed_time(choice, size, 4, NOMINAL)
        assert closed.total_ps == schedule_time(choice, size, 4, NOMINAL).total_ps
        whole = closed_time(choose(kind, healthy, groups, size, 4, NOMINAL), size, 4, NOMINAL)
        assert closed.total_ps >= whole.total_ps
        slower += closed.total_ps > whole.total_ps
    assert slower  # at some size: a large one may have a rank's own path for its bottleneck


def test_nothing_crosses_a_dead_link_or_device() -> None:
    healthy = machines()
    for name, links in PATTERNS.items():
        dead = {link for link, left in links.items() if left == 0}
        topology = degraded(healthy, pattern_of(links))
        used = set(topology.routes[topology.routes >= 0].tolist())
        used |= {*topology.efa_out.tolist(), *topology.efa_in.tolist()}
        ends = {
            (int(topology.link_source[n]), int(topology.link_target[n]))
            for n in used
            if not topology.is_efa[n]
        }
        assert not any({(a, b), (b, a)} & ends for a, b in dead if a != "efa"), name
        if ("efa", 15) in dead:
            assert len(set(topology.efa_out.tolist())) == 15
        for a in range(16):
            for b in range(16):
                chip = a
                for n in (n for n in topology.routes[a, b].tolist() if n >= 0):
                    assert topology.link_source[n] == chip
                    chip = int(topology.link_target[n])
                assert chip == b


def between(*links: dict[Link, float], size: int = 1 << 22) -> int:
    """Duration of a gather over 64 ranks of instances with these faults."""
    target, mesh = load_target("trn1n.32xlarge"), {"dp": 64}
    call = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 1, size // 4 // 64))
    return Network(target, 2, mesh, "nominal").duration(call, map(pattern_of, links)).duration_ps


def test_faults_of_several_instances_are_priced_in_step() -> None:
    """Faults of one instance are not those of another: each is routed on its own, and every phase
    waits for the slowest."""
    assert between() == between({}, {}) < between({(0, 1): 0.2})
    assert between({(0, 1): 0.5, (1, 2): 0.2}, {(0, 1): 0.5}) == between({(0, 1): 0.5, (1, 2): 0.2})
    inside, across = {(0, 1): 0.1}, {("efa", 2): 0.1}
    apart = max(between(inside), between(across))
    assert apart < between(inside, across) <= between(inside) + between(across) - between()
    assert degraded(machines(), ()) is machines()


def test_a_machine_without_devices_has_none_to_degrade() -> None:
    alone = cluster_topology(load_target("trn1.2xlarge"), 1)
    with pytest.raises(UsageError, match="an EFA device below 0, got efa0"):
        degraded(alone, pattern_of({("efa", 0): 0.5}))


def test_no_device_is_left_only_where_one_instance_has_lost_all() -> None:
    first, second = ({("efa", d): 0.0 for d in half} for half in (range(8), range(8, 16)))
    assert between(first, second) == max(between(first), between(second)) > between()
    with pytest.raises(UsageError, match="an EFA device that is left"):
        between(first | second)


@pytest.mark.parametrize(
    ("links", "text"),
    [
        ({(0, 5): 0.5}, "two chips that a link joins, got 0-5"),
        ({("efa", 16): 0.5}, "an EFA device below 16, got efa16"),
        ({(0, c): 0.0 for c in (1, 3, 4, 12)}, "a way between chips 0 and"),
        ({("efa", d): 0.0 for d in range(16)}, "an EFA device that is left"),
    ],
)
def test_links_that_are_not_there(links: dict[Link, float], text: str) -> None:
    with pytest.raises(UsageError, match="SW_FAULT") as caught:
        degraded(machines(), pattern_of(links))
    assert text in str(caught.value)


def test_cores_and_instances_that_are_not_there() -> None:
    check_faults(Faults(slow_cores={31: 2.0}, links={1: {}}), 32, 2)
    for faults in (Faults(slow_cores={32: 2.0}), Faults(dead_cores=frozenset({40}))):
        with pytest.raises(UsageError, match="requires core numbers below 32"):
            check_faults(faults, 32, 1)
    with pytest.raises(UsageError, match="requires instance numbers below 2, got 2"):
        check_faults(Faults(links={2: {}}), 64, 2)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (Faults(slow_cores={2: 2.0}, links={0: {}}), ""),
        (Faults(slow_cores={3: 2.0}), "requires core numbers below 3"),
        (Faults(links={1: {}}), "requires instance numbers below 1, got 1"),
    ],
)
def test_a_step_is_not_timed_with_faults_of_what_it_does_not_run_on(
    faults: Faults, text: str
) -> None:
    """Three ranks on one instance."""
    target, mesh = load_target("trn1.32xlarge"), {"dp": 3}
    step = Step(programs={}, schedules=((),), mesh=mesh, target=target, instances=1, faults=faults)
    network = Network(target, 1, mesh, "nominal")
    with pytest.raises(UsageError, match=text) if text else nullcontext():
        Ranks(step, network, target.cores_per_bank)


def test_a_dead_core_says_who_hangs_and_where() -> None:
    with pytest.raises(SimulationError) as caught:
        on_trn1n(Faults(dead_cores=frozenset({77})), folded=True)
    diagnostic = caught.value.diagnostic
    assert (diagnostic.code, caught.value.exit_code) == ("SW_DEAD_CORE", 72)
    assert "got core 77 (rank 77) dead: 511 of 512 ranks hang" in diagnostic.message
    assert "in all_gather over dp" in diagnostic.message
    assert "in all_reduce over tp" in diagnostic.message
    with pytest.raises(SimulationError) as unfolded:
        on_trn1n(Faults(dead_cores=frozenset({77})), folded=False)
    assert str(unfolded.value) == str(caught.value)


@pytest.mark.parametrize("kind", FAULT_CLASSES)
def test_a_core_whose_hardware_fails_ends_the_run_with_the_runtimes_status(kind: str) -> None:
    fault = FAULT_CLASSES[kind]
    told = []
    for folded in (True, False):
        with pytest.raises(SimulationError) as caught:
            on_trn1n(Faults(hardware={77: kind}), folded=folded)
        told.append(str(caught.value))
    diagnostic = caught.value.diagnostic
    assert told[0] == told[1] and diagnostic.code == "SW_HARDWARE_FAULT"
    assert f"core 77 has {fault.says}, {fault.status} ({fault.code}) (rank 77)" in told[0]
    assert "511 of 512 ranks hang" in diagnostic.message and diagnostic.hint == fault.action


def test_statuses_are_those_of_the_runtimes_header() -> None:
    """nrt_status.h; a hang that is none of these is NRT_TIMEOUT."""
    found = {kind: (fault.code, fault.status) for kind, fault in FAULT_CLASSES.items()}
    assert found == {
        "collectives": (1200, "NRT_EXEC_HW_ERR_COLLECTIVES"),
        "hbm": (1201, "NRT_EXEC_HW_ERR_HBM_UE"),
        "sram": (1202, "NRT_EXEC_HW_ERR_NC_UE"),
        "dma": (1203, "NRT_EXEC_HW_ERR_DMA_ABORT"),
        "hbm-repairable": (1205, "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE"),
        "compute": (5, "NRT_TIMEOUT"),
    }


def test_a_hang_on_collectives_computes_up_to_its_first() -> None:
    call = CollectiveCall("all_reduce", ("dp",), DType.F32, (1, 8, 1), "add")
    macros = [Mark("step"), Start(call, 0), Wait(0)]
    assert list(heard_of("collectives", macros)) == macros[:1] and not heard_of("hbm", macros)
    assert heard_of("collectives", macros[:1]) == macros[:1]


def test_several_faults_are_told_with_what_helps_against_each() -> None:
    faults = Faults(hardware={3: "hbm", 5: "hbm-repairable"}, dead_cores=frozenset({77}))
    with pytest.raises(SimulationError) as caught:
        on_trn1n(faults, folded=True)
    told = caught.value.diagnostic
    assert "(1201), core 5 has" in told.message
    assert "core 77 is dead (rank 2, 5, 77)" in told.message  # rank 2 is placed on core 3
    assert "gives it other hardware" in told.hint and "repairs the rows" in told.hint


def test_who_waits_for_a_late_core_says_so_every_two_minutes() -> None:
    assert waiting({}) == waiting({5: 120.0}) == []
    assert waiting({5: 120.5}) == [(120.0, (5,))]
    assert waiting({5: 300.0, 9: 130.0}) == [(120.0, (5, 9)), (240.0, (5,))]


def test_a_late_core_does_not_change_the_step() -> None:
    late, _ = on_trn1n(Faults(late_cores={77: 300.0}), folded=True)
    healthy, _ = on_trn1n(Faults(), folded=True)
    assert [r.end_ps for r in late] == [r.end_ps for r in healthy]
    assert Faults(late_cores={77: 300.0}) and Faults(hardware={77: "hbm"}) and not Faults()


def test_ranks_as_text() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_the_latest_of_many_ranks() -> None:
    """Mean of the largest of n exponential delays: the harmonic number of n, times the jitter."""
    for ranks in (1, 4, 64):
        draws = [Delay(1.0, 0.1, ranks, f"{seed}").factor() for seed in range(2000)]
        harmonic = sum(1 / n for n in range(1, ranks + 1))
        assert statistics.mean(draws) == pytest.approx(1 + 0.1 * harmonic, rel=0.01)


def test_a_class_is_as_late_as_its_latest_rank() -> None:
    """Where all ranks meet after every stretch, a class of ranks with one draw takes as long on
    average as ranks that draw for themselves."""
    apart = refine({"dp": 16}, [("dp",)], list(range(16)))
    delays = [Delay(1.0, 0.1, 1, f"rank {rank}") for rank in range(apart.count)]
    latest = [max(d.factor() for d in delays) for _ in range(2000)]
    folded = Delay(1.0, 0.1, 16, "class")
    drawn = [folded.factor() for _ in range(2000)]
    assert statistics.mean(drawn) == pytest.approx(statistics.mean(latest), rel=0.01)
