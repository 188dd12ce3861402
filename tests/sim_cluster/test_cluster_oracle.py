"""The cluster loop against its oracle, and classes of ranks against every rank on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.collectives.ops import ReplicaGroups
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.timing.evaluate import Segment
from shardwright.orchestrator.road.timing import step_of
from shardwright.sim_cluster.network.network import Network
from shardwright.sim_cluster.timing.actors import CollectiveDuration
from shardwright.sim_cluster.timing.classes import refine
from shardwright.sim_cluster.timing.contention import DEFAULT_PACKETS, Demand, Packets
from shardwright.sim_cluster.timing.faults import Faults, Health
from shardwright.sim_cluster.timing.macro import MacroOp, Start, Stretch, Wait
from shardwright.sim_cluster.timing.run_timing import ClassResult, ClusterLoop
from shardwright.sim_cluster.timing.step_time import Ranks, Step, time_step
from tests.support.fluid_cluster import FluidCluster
from tests.support.small_job import build_on, small_llama

GATHER = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
REDUCE = CollectiveCall("all_reduce", ("dp",), DType.F32, (1, 1, 64), "add", 1)


def stretch(ps: int, half: int, bank: int, scarce: int, hbm: float = 1.0) -> Stretch:
    """On a bank of two; code takes at least as much of the engines as it waits for them."""
    dma = max(0.1, 2 * (1 - (bank or ps) / half)) if hbm else 0.0
    segment, demand = Segment("compute", ps), Demand(dma, hbm=hbm)
    return Stretch(ps, half, ps // 2, segment, "f", "", bank, scarce, 2, demand)


def both_ways(
    macros: Sequence[MacroOp],
    costs: Mapping[CollectiveCall, CollectiveDuration],
    mesh: Mapping[str, int],
    slow: Mapping[int, float],
    packets: Packets = DEFAULT_PACKETS,
) -> tuple[list[int], list[Fraction]]:
    """End times of all ranks of a mesh on chips of two: by the loop, folded, and by the oracle."""
    count = mesh["dp"]
    speeds, banks = [slow.get(r, 1.0) for r in range(count)], [r // 2 for r in range(count)]
    classes = refine(mesh, [("dp",)], speeds, banks)
    health = Health(slow={c: speeds[classes.representative(c)] for c in range(classes.count)})
    programs = [macros] * classes.count
    loop = ClusterLoop(
        classes, programs, lambda call, _: costs[call], health, packets=packets, bank_cores=2
    )
    results = loop.run()
    groups = {("dp",): ReplicaGroups.from_axes(mesh, ("dp",)).groups}
    chips = [range(r, min(r + 2, count)) for r in range(0, count, 2)]
    oracle = FluidCluster([macros] * count, groups, costs.__getitem__, packets, chips, slow, 2)
    return [results[c].end_ps for c in classes.of_rank], oracle.run()


def test_two_cores_of_a_chip_with_one_collective() -> None:
    """Exact: each core has half of the HBM bank while both compute, all of it once the other one
    waits; the collective starts when the slower core comes to it and takes half of the engines."""
    costs = {GATHER: CollectiveDuration(640, Demand(0.5), "ring", "", 128, 2)}
    macros: list[MacroOp] = [
        stretch(1000, 1600, 600, 1000),
        Start(GATHER, 0),
        stretch(1000, 2000, 1000, 1000),
        Wait(0),
    ]
    found, expected = both_ways(macros, costs, {"dp": 2}, {1: 2.0})
    # Core 0 is done with its first stretch at 1000 and with its second at 2000; core 1, twice as
    # slow, at 2000, since they shared HBM until then. From 2000 the collective runs for 640; core 1
    # has half of the engines and does 160 of 1000, the other 840 at full speed, twice as slow.
    assert expected == [Fraction(2640), Fraction(2640 + 1680)]
    assert found == expected


def test_a_core_alone_has_the_whole_bank() -> None:
    """A core whose neighbour waits runs at the rate of the whole bank."""
    costs = {GATHER: CollectiveDuration(100, Demand(0.0), "ring", "", 128, 2)}
    macros: list[MacroOp] = [stretch(1000, 1000, 600, 1800), Start(GATHER, 0), Wait(0)]
    found, expected = both_ways(macros, costs, {"dp": 2}, {1: 2.0})
    # At 1000 core 1 has half of its 2000 left, which takes 600 with the bank to itself.
    assert expected == [Fraction(1700), Fraction(1700)]
    assert found == expected


@pytest.mark.parametrize(
    ("banks", "mates"),
    [
        ([0, 0, 1], [1, 1, 0]),
        ([0, 1, 1, 1], [0, 2, 2, 2]),  # as many as two full banks of two
        ([2, 0, 2, 0, 1], [1, 1, 1, 1, 0]),
        ([0, 0, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_banks_that_a_mesh_does_not_fill(banks: list[int], mates: list[int]) -> None:
    """A rank has the mates that are on its bank, and ranks of one class as many."""
    count = len(banks)
    folded = refine({"dp": count}, [("dp",)], [0] * count, banks)
    assert [len(folded.mates(c)) for c in folded.of_rank] == mates
    assert folded.count == len(set(mates))
    alone = refine({"dp": count}, [("dp",)], range(count), banks)
    for rank in range(count):
        found = {r for r in range(count) if alone.of_rank[r] in alone.mates(alone.of_rank[rank])}
        assert found == {r for r in range(count) if banks[r] == banks[rank]} - {rank}


def test_three_ranks_on_chips_of_two() -> None:
    """The core without a neighbour meets the others in the collective, and nobody on its bank."""
    target = load_target("trn1.32xlarge")
    mesh = {"dp": 3}
    step = Step(programs={}, schedules=((),), mesh=mesh, target=target, instances=1)
    ranks = Ranks(step, Network(target, 1, mesh, "nominal"), target.cores_per_bank)
    classes = ranks.classes([("dp",)], True)
    assert [classes.ranks(c) for c in range(classes.count)] == [(0, 1), (2,)]
    macros: list[MacroOp] = [stretch(1000, 1000, 600, 1800), Start(GATHER, 0), Wait(0)]
    loop = ClusterLoop(classes, [macros] * 2, ranks.priced(classes), bank_cores=2)
    first, last = loop.run()
    assert first.end_ps == last.end_ps > 1000
    # Its code has the whole bank from the beginning.
    assert (first.charged_ps["memory"], last.charged_ps["memory"]) == (500, 100)


_US = 10**6


def _of(us: int, half: float, bank: float, scarce: float, hbm: float) -> Stretch:
    whole = int(us * bank * _US)
    return stretch(us * _US, int(whole * half), whole, int(us * scarce * _US), hbm)


_moving = st.builds(
    _of,
    st.integers(1, 50),
    st.floats(1.0, 2.0),
    st.floats(0.5, 1.0),
    st.floats(1.0, 2.0),
    st.floats(0.1, 2.0),
)
_still = st.builds(lambda us: stretch(us * _US, us * _US, 0, 0, 0), st.integers(1, 50))
_stretches = _moving | _still


def _program(parts: Sequence[tuple[Stretch, bool, Stretch]]) -> list[MacroOp]:
    """Collectives beside stretches, one after the other."""
    ops: list[MacroOp] = []
    for slot, (before, gathers, beside) in enumerate(parts):
        call = GATHER if gathers else REDUCE
        ops += [before, Start(call, slot), beside, *([Wait(slot)] if slot % 3 else [])]
    return [*ops, *(Wait(slot) for slot in range(0, len(parts), 3))]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(_stretches, st.booleans(), _stretches), min_size=1, max_size=5),
    st.tuples(*[st.floats(0.05, 1.0)] * 4),
    st.sampled_from([{}, {1: 1.7}, {0: 1.25, 2: 2.0}]),
    st.sampled_from([3, 4]),
    st.sampled_from([DEFAULT_PACKETS, Packets(65536, (4096, 16384))]),
)
def test_random_programs(
    parts: list[tuple[Stretch, bool, Stretch]],
    wants: tuple[float, ...],
    slow: dict[int, float],
    ranks: int,
    packets: Packets,
) -> None:
    """Chips of two, one of them perhaps with one core, with two streams: the loop rounds every
    event to a picosecond, the oracle none."""
    costs = {
        GATHER: CollectiveDuration(7 * _US, Demand(wants[0], hbm=wants[1]), "", "", 128, 4),
        REDUCE: CollectiveDuration(
            5 * _US, Demand(wants[2], ((0, 1.0),), hbm=wants[3]), "", "", 128, 4
        ),
    }
    found, expected = both_ways(_program(parts), costs, {"dp": ranks}, slow, packets)
    events = 40 * len(parts)
    assert all(abs(f - e) <= events for f, e in zip(found, expected, strict=True))


LAYER_GATHER = CollectiveCall("all_gather", ("dp",), DType.BF16, (1, 1, 1 << 16))
TENSOR_REDUCE = CollectiveCall("all_reduce", ("tp",), DType.BF16, (1, 1, 1 << 20), "add", 1)
MESH = {"dp": 64, "tp": 8}


def layers(count: int) -> list[MacroOp]:
    beside = stretch(40 * _US, 90 * _US, 33 * _US, 70 * _US)
    alone = stretch(900 * _US, 950 * _US, 0, 0, 0)
    layer: list[MacroOp] = [
        Start(LAYER_GATHER, 0),
        beside,
        Start(TENSOR_REDUCE, 1),
        alone,
        Wait(1),
        Wait(0),
    ]
    return layer * count


def on_trn1n(faults: Faults, folded: bool) -> tuple[list[ClassResult], int]:
    """Results of all 512 ranks of 16 instances, and the number of classes."""
    target = load_target("trn1n.32xlarge")
    step = Step(programs={}, schedules=((),), mesh=MESH, target=target, instances=16, faults=faults)
    ranks = Ranks(step, Network(target, 16, MESH, "nominal"), target.cores_per_bank)
    classes = ranks.classes([("dp",), ("tp",)], folded)
    macros = [layers(3)] * classes.count
    loop = ClusterLoop(classes, macros, ranks.priced(classes), ranks.health(classes))
    results = loop.run()
    return [results[c] for c in classes.of_rank], classes.count


FAULTS = {
    "healthy": Faults(),
    "one straggler": Faults(slow_cores={77: 1.3}),
    "a slow instance and a slow core": Faults(
        slow_cores={**dict.fromkeys(range(32, 64), 1.1), 300: 2.0}
    ),
    "links": Faults(links={2: {(0, 1): 0.25}, 5: {("efa", 3): 0.0}}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_classes_of_512_ranks_give_every_rank_its_own_time(name: str) -> None:
    folded, count = on_trn1n(FAULTS[name], folded=True)
    unfolded, ranks = on_trn1n(FAULTS[name], folded=False)
    assert (count < 64, ranks) == (True, 512)
    assert [r.end_ps for r in folded] == [r.end_ps for r in unfolded]
    assert [r.charged_ps for r in folded] == [r.charged_ps for r in unfolded]


@pytest.mark.matrix
def test_a_compiled_step_on_512_ranks_is_the_same_folded_and_not(tmp_path: Path) -> None:
    """FSDP with copies of the state, from the JAX step to the end of every rank, healthy and with a
    straggler."""
    mesh = {"dp_replicate": 64, "dp_shard": 8}
    built = build_on(small_llama(), mesh, tmp_path, num_microbatches=1).built
    healthy = replace(step_of(built, built.programs), instances=16)
    for step in (healthy, replace(healthy, faults=Faults(slow_cores={77: 1.3}))):
        folded, unfolded = time_step(step), time_step(step, folded=False)
        assert folded.classes.count < unfolded.classes.count == 512
        alone = [folded.results[c] for c in folded.classes.of_rank]
        each = [unfolded.results[c] for c in unfolded.classes.of_rank]
        assert [r.end_ps for r in alone] == [r.end_ps for r in each]
        assert [r.charged_ps for r in alone] == [r.charged_ps for r in each]


def test_faults_only_ever_slow_down() -> None:
    ends = {name: max(r.end_ps for r in on_trn1n(f, True)[0]) for name, f in FAULTS.items()}
    assert min(ends, key=ends.__getitem__) == "healthy"
    assert len(set(ends.values())) == len(ends)


def test_jitter_is_drawn_from_its_seed_and_grows() -> None:
    def end(**given: float) -> int:
        return max(r.end_ps for r in on_trn1n(replace(Faults(), **given), True)[0])

    assert end(jitter=0.05, seed=3) == end(jitter=0.05, seed=3) != end(jitter=0.05, seed=4)
    assert end() < end(jitter=0.01) < end(jitter=0.05)
