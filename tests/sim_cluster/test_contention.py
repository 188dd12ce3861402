"""Shares of what collectives and compute contend for: nothing is lost, nothing is given twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.target import Target, load_target, logical, target_names
from shardwright.compiler.timing.evaluate import Segment
from shardwright.sim_cluster.network.network import Network
from shardwright.sim_cluster.profiles import PROFILES
from shardwright.sim_cluster.timing.classes import refine
from shardwright.sim_cluster.timing.contention import (
    DEFAULT_PACKETS,
    Demand,
    Packets,
    core_rates,
    shares,
)
from shardwright.sim_cluster.timing.macro import MacroOp, Start, Stretch, Wait, _Code
from shardwright.sim_cluster.timing.run_timing import ClusterLoop, CollectiveDuration
from tests.support.cells import long_in_matrix

GATHER = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
rows = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.1, 100.0)), min_size=1, max_size=6)


@settings(deadline=None)
@given(rows)
def test_shares_are_fair(found: list[tuple[float, float]]) -> None:
    demands, weights = zip(*found, strict=True)
    given_ = shares(demands, weights)
    assert sum(given_) <= 1 + 1e-9
    assert all(g <= d + 1e-12 for g, d in zip(given_, demands, strict=True))
    level = [g / w for g, w in zip(given_, weights, strict=True)]
    short = [i for i, (g, d) in enumerate(zip(given_, demands, strict=True)) if g < d - 1e-9]
    assert all(level[i] >= max(level) - 1e-9 * max(1.0, max(level)) for i in short)
    if short:
        assert sum(given_) == pytest.approx(1)


ALL = Demand(1.0)


def test_packets_decide_who_gets_the_engines() -> None:
    """Code that fights one collective for all engines has 1/17 of them with packets of 4 KiB
    against 64 KiB, half with equal packets."""
    hungry = ((ALL, 0),)
    assert core_rates(hungry, DEFAULT_PACKETS, ALL) == ((16 / 17,), pytest.approx(1 / 17), 1.0)
    rates, code, _ = core_rates(hungry, Packets(4096, (4096,)), ALL)
    assert (rates, code) == ((0.5,), 0.5)
    both = ((ALL, 0), (ALL, 1))
    rates, code, _ = core_rates(both, Packets(4096, (65536, 4096)), ALL)
    assert rates[0] == pytest.approx(16 * rates[1])
    assert code == pytest.approx(rates[1])


@pytest.mark.parametrize("packets", [DEFAULT_PACKETS, Packets(65536, (4096,))])
@pytest.mark.parametrize("wants", [0.0, 0.3, 0.7])
def test_code_claims_no_more_than_it_takes(packets: Packets, wants: float) -> None:
    """Whoever has the larger packets: code and a collective that fit beside each other run as if
    alone, and a collective that does not fit has what code does not take."""
    fits, too_much = ((Demand(1 - wants, hbm=1 - wants), 0),), ((Demand(1.0, hbm=1.0), 0),)
    code = Demand(wants, hbm=wants)
    rates, *left = core_rates(fits, packets, code)
    assert rates == pytest.approx((1.0,))
    assert left == pytest.approx([wants, wants])
    (rate,), *left = core_rates(too_much, packets, code)
    weights = packets.of(0), packets.compute_bytes
    assert rate == pytest.approx(max(1 - wants, weights[0] / sum(weights)))
    assert left == pytest.approx([1 - rate, 1 - rate])


@pytest.mark.parametrize("packets", [DEFAULT_PACKETS, Packets(65536, (4096,))])
def test_code_that_waits_or_moves_nothing_slows_nobody_down(packets: Packets) -> None:
    """A collective that can take all engines and all HBM, beside code without DMA and then beside
    nothing, takes as long as alone."""
    cost = CollectiveDuration(830, Demand(1.0, hbm=1.0), "ring", "", 128, 4)
    still = Stretch(300, 300, 300, Segment("compute", 300), "f")
    classes = refine({"dp": 4}, [("dp",)], [0] * 4, [0, 0, 1, 1])
    macros: list[MacroOp] = [Start(GATHER, 0), still, Wait(0)]
    loop = ClusterLoop(classes, [macros], lambda call, _: cost, packets=packets, bank_cores=2)
    assert loop.run()[0].end_ps == 830


LARGEST = tuple(name for name in target_names() if name.endswith("ultraserver"))


@pytest.mark.parametrize("name", long_in_matrix(target_names(), LARGEST))
def test_a_collective_beside_nothing_takes_as_long_as_alone(name: str) -> None:
    """No collective asks for more than its cores have: on every machine, under every profile, with
    every algorithm that sizes and groups choose."""
    machine = load_target(name)
    cases = [(logical(machine, lnc), 1) for lnc in machine.allowed_lnc]
    cases += [(logical(machine), 2)] if machine.efa_devices else []
    for target, instances in cases:
        mesh = {"dp": target.cores * instances // 2, "tp": 2}
        for profile, axis in product(PROFILES, mesh):
            network = Network(target, instances, mesh, profile)
            for call in _calls(axis, mesh[axis]):
                cost = network.duration(call)
                assert _alone(call, cost, mesh, target) == cost.duration_ps, (profile, call, cost)


def _calls(axis: str, group: int) -> Iterator[CollectiveCall]:
    for kind, elements in product(KINDS, (64, 1 << 16, 1 << 21, 1 << 27)):
        source = max(elements, group) // (group if kind == "all_gather" else 1)
        reduction = "add" if "reduce" in kind else ""
        yield CollectiveCall(kind, (axis,), DType.BF16, (1, source, 1), reduction)


def _alone(
    call: CollectiveCall, cost: CollectiveDuration, mesh: Mapping[str, int], target: Target
) -> int:
    """How long a collective takes in the loop while every core waits for it."""
    ranks, parts = prod(mesh.values()), target.cores_per_bank
    classes = refine(mesh, [call.axes], [0] * ranks, [rank // parts for rank in range(ranks)])
    macros = [[Start(call, 0), Wait(0)]] * classes.count
    loop = ClusterLoop(classes, macros, lambda call, _: cost, bank_cores=parts)
    return max(result.end_ps for result in loop.run())


def test_streams_share_a_wire() -> None:
    """Two collectives bound by one wire take twice as long together; one on others loses
    nothing."""
    jobs = (
        (Demand(0.1, wires=((0, 0.2), (64, 1.0))), 0),
        (Demand(0.1, wires=((1, 0.2), (64, 1.0))), 1),
        (Demand(0.1, wires=((0, 0.5), (2, 1.0))), 2),
    )
    rates, code, _ = core_rates(jobs, DEFAULT_PACKETS, ALL)
    assert rates == (0.5, 0.5, 1.0)
    assert code == pytest.approx(0.8)  # two at half speed take half of what they would


GATHER = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
REDUCE = CollectiveCall("all_reduce", ("dp",), DType.F32, (1, 1, 64), "add")
DEMANDS = {"efa": Demand(0.0, wires=((64, 1.0),)), "link": Demand(0.0, wires=((0, 1.0),))}


def _end(streams: tuple[int, int], bounds: tuple[str, str]) -> int:
    """When a gather of 400 ps and a reduction of 300 ps have both finished, beside compute."""
    calls = [
        CollectiveCall(c.kind, c.axes, c.dtype, c.source_shape, c.reduction, stream)
        for c, stream in zip((GATHER, REDUCE), streams, strict=True)
    ]
    costs = {
        call: CollectiveDuration(ps, DEMANDS[bound], "ring", "", 128, 4)
        for call, ps, bound in zip(calls, (400, 300), bounds, strict=True)
    }
    macros: list[MacroOp] = [Start(calls[0], 0), Start(calls[1], 1)]
    macros += [Stretch(100, 100, 100, Segment("compute", 100), "f"), Wait(0), Wait(1)]
    classes = refine({"dp": 4}, [("dp",)], [0] * 4)
    (result,) = ClusterLoop(classes, [macros], lambda call, _: costs[call]).run()
    assert sum(result.charged_ps.values()) == result.end_ps
    return result.end_ps


def test_streams_help_when_they_use_other_wires() -> None:
    """One stream serves in turn; two overlap, as far as the wires are not the same."""
    assert _end((0, 0), ("efa", "link")) == 700
    assert _end((0, 1), ("efa", "link")) == 400
    assert _end((0, 1), ("efa", "efa")) == 700


def test_collectives_of_rows_and_of_columns_use_other_links() -> None:
    """On the torus, groups along one side leave the links of the other alone; twice the same side
    takes twice as long where links are what limits."""
    mesh = {"column": 4, "row": 4, "core": 2}
    network = Network(load_target("trn1.32xlarge"), 1, mesh, "peak", "linear")

    def demand(axis: str, stream: int) -> tuple[Demand, int]:
        shape = (1, 1 << 24, 1)
        call = CollectiveCall("all_gather", (axis,), DType.BF16, shape, stream=stream)
        return network.duration(call).demand, stream

    row, column = demand("row", 0), demand("column", 1)
    assert not {w for w, _ in row[0].wires} & {w for w, _ in column[0].wires}
    assert max(share for _, share in row[0].wires) > 0.9
    apart, *_ = core_rates((row, column), DEFAULT_PACKETS)
    same, *_ = core_rates((row, demand("row", 1)), DEFAULT_PACKETS)
    assert min(apart) > 1.5 * max(same)
    assert same == pytest.approx((0.5, 0.5), abs=0.05)


@pytest.mark.parametrize("half", [1000, 1300, 2000])
def test_bytes_cost_code_the_same_however_fast_they_move(half: int) -> None:
    """A collective that takes a part of the DMA engines for longer takes as much from the code."""

    def end(share: float, duration_ps: int) -> int:
        cost = CollectiveDuration(duration_ps, Demand(share), "ring", "", 128, 4)
        code = Stretch(1000, half, 500, Segment("compute", 1000), "f")
        macros: list[MacroOp] = [Start(GATHER, 0), code, Wait(0)]
        classes = refine({"dp": 4}, [("dp",)], [0] * 4)
        (result,) = ClusterLoop(classes, [macros], lambda call, _: cost).run()
        return result.end_ps

    lost = {end(share, round(160 / share)) - 1000 for share in (0.2, 0.32, 0.5, 0.8)}
    assert max(lost) - min(lost) <= 1
    assert lost == {0} or half > 1000
    assert (max(lost) in (159, 160, 161)) == (half == 2000)


@pytest.mark.parametrize("bank", [1000, 500, 100])
def test_code_that_takes_no_engines_is_not_stopped_by_who_takes_all(bank: int) -> None:
    """Two collectives leave nothing of the DMA engines to code that says it does not use them: its
    bytes of HBM alone decide how long it takes."""
    points = [[Segment("compute", ps, hbm_bytes=64)] for ps in (1000, 2000, bank, 1000)]
    target = load_target("trn1.32xlarge")
    code = _Code.of(points[0], points[1:], target).stretch(points[0][0], "f", 2)
    assert code.demand.dma == 0
    gathers = [replace(GATHER, stream=stream) for stream in (0, 1)]
    cost = CollectiveDuration(5000, Demand(0.9), "ring", "", 128, 4)
    starts: list[MacroOp] = [Start(call, call.stream) for call in gathers]
    classes = refine({"dp": 4}, [("dp",)], [0] * 4)
    loop = ClusterLoop(classes, [[*starts, code]], lambda call, _: cost)
    loop.run()
    assert loop.actors[0].result.ran[0].end_ps == 1000
