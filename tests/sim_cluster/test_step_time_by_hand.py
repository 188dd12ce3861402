"""Steps of small programs, charged to the picosecond, worked out by hand.

Vector of trn1n runs at 1.12 GHz times what the profile credits: 0.815, 0.912 or all of it. A
program is launched in 100 us (default). Collectives as in test_network_by_hand.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor
from shardwright.compiler.isa.program import (
    AccessPattern,
    Call,
    CollectiveCall,
    Engine,
    Function,
    Instr,
    Kernel,
    Program,
    Repeat,
    Space,
    Tile,
)
from shardwright.compiler.machine.target import load_target, logical
from shardwright.compiler.neff.schedule import Transfer
from shardwright.compiler.timing.evaluate import Segment
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.faults import Faults
from shardwright.sim_cluster.timing.macro import (
    Mark,
    Receive,
    Send,
    Stretch,
    Wait,
    function_macros,
    message_call,
    program_macros,
    schedule_macros,
)
from shardwright.sim_cluster.timing.step_time import Replayed, Step, band, time_step

TRN1N = load_target("trn1n.32xlarge")
HELD = AccessPattern(Space.SBUF, 0, Affine(), ((1, 128), (1, 1024)))
ADD = Instr("tensor_tensor", Engine.VECTOR, HELD, (HELD, HELD), {"op": "add"})
# 64 KiB of each of two ranks
GATHER = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 16_384, 1))


def addition() -> Kernel:
    """2 * 1024 cycles of Vector, then 60 to reach SBUF."""
    tiles = [Tile("t", Space.SBUF, 128, 1024, DType.F32)]
    return Kernel(KernelProgram("compute", "add"), tiles, [ADD])


def event(kind: str) -> Kernel:
    return Kernel(KernelProgram(kind, kind, attrs={"collective": 0}))


CALL = Call(0, (), ())


def program(kernels: Sequence[Kernel], *steps: Call | Repeat) -> Program:
    """A program that calls one function, once unless told otherwise."""
    tensors = [Tensor("x", (1,), DType.F32, "input")]
    function = Function("f", tensors, (), (), (), 0, list(kernels), [GATHER])
    return Program("p", TRN1N.name, [function], [], (), (), steps or (CALL,), 0)


OVERLAPPED = [addition(), event("collective_start"), addition(), event("collective_wait")]


def timed(profile: str, one: Program, runs: int = 1, **more: Any) -> Replayed:
    step = Step(
        programs={"p": one},
        schedules=(((("p",), runs),),),
        mesh={"rest": 16, "dp": 2},
        target=TRN1N,
        instances=1,
        **more,
    )
    return time_step(step, profile)


@pytest.mark.parametrize(
    ("profile", "add_ps", "busy_ps", "gather_ps"),
    [
        # 2048 / 0.9128 = 2,243,646.4, 60 / 0.9128 = 65,731.8; 12 + 1.4 us + 65,536 / 71.264 GB/s
        ("conservative", 2_243_646 + 65_731, 2_243_646, 13_400_000 + 919_623),
        # Neighbours fill all stalls: 2048 / 1.02144; 0.7 + 1.4 us + 65,536 / 83.776 GB/s
        ("nominal", 2_005_013, 2_005_013, 2_100_000 + 782_277),
        # 2048 / 1.12; 0.7 + 1 us; 65,536 / 272 GB/s are less than 131,072 touched bytes / 410
        ("peak", 1_828_571, 1_828_571, 1_700_000 + 319_688),
    ],
)
def test_a_step_of_three_runs(profile: str, add_ps: int, busy_ps: int, gather_ps: int) -> None:
    """Launch, addition, gather beside the second addition; three times. A wire is 0.7 us; both
    ranks share a chip."""
    found = timed(profile, program(OVERLAPPED), 3)
    assert found.step_time_ps == 3 * (100_000_000 + add_ps + gather_ps)
    assert found.breakdown_ps == {
        "launch": 300_000_000,
        "compute": 6 * busy_ps,
        "memory": 6 * (add_ps - busy_ps),
        "collective_dp": 3 * (gather_ps - add_ps),
        "bubble": 0,
        "idle": 0,
    }
    assert found.hidden_ps == {"collective_dp": 3 * add_ps}
    assert found.engines_ps == {"vector": 6 * busy_ps}
    (use,) = found.collectives
    assert (use.count, use.total_ps, use.exposed_ps) == (
        3,
        3 * gather_ps,
        3 * (gather_ps - add_ps),
    )
    assert found.stages_ps == (found.breakdown_ps,)
    exposed = 3 * (gather_ps - add_ps)
    of_function = {"compute": 6 * busy_ps, "collective_dp": exposed}
    if add_ps > busy_ps:
        of_function["memory"] = 6 * (add_ps - busy_ps)
    assert found.last.placed_ps == {("p", -1): {"launch": 300_000_000}, ("p", 0): of_function}


def test_jitter_is_drawn_for_every_micro_batch() -> None:
    """None is like the one before, so none is taken for it."""
    step = Step(
        programs={"p": program(OVERLAPPED)},
        schedules=(((("p",), 20),),),
        mesh={"rest": 16, "dp": 2},
        target=TRN1N,
        instances=1,
        faults=Faults(jitter=0.05, seed=3),
    )
    assert time_step(step).step_time_ps == time_step(step, traced=True).step_time_ps


def test_repeats_and_several_calls() -> None:
    """One launch; 2 + 3 * (1 + 2) = 11 calls of one addition."""
    nest = Repeat(0, 3, (CALL, Repeat(1, 2, (CALL,))))
    found = timed("peak", program([addition()], CALL, nest, CALL))
    assert found.step_time_ps == 100_000_000 + 11 * 1_828_571


def test_the_band_is_that_of_all_profiles() -> None:
    step = Step(
        programs={"p": program([addition()])},
        schedules=(((("p",), 1),),),
        mesh={"dp": 2},
        target=TRN1N,
        instances=1,
    )
    assert {name: found.step_time_ps for name, found in band(step).items()} == {
        "conservative": 102_309_377,
        "nominal": 102_005_013,
        "peak": 101_828_571,
    }


def test_a_slow_core_takes_as_many_times_as_long() -> None:
    """1.25 times the launch and both additions; the other core of its pair waits for it, and the
    gather begins when both are there."""
    slow = timed("peak", program(OVERLAPPED), faults=Faults(slow_cores={3: 1.25}))
    assert slow.step_time_ps == 125_000_000 + 2 * 2_285_714  # 1.25 * 1,828,571 = 2,285,713.75
    assert slow.rank_classes == 3
    exposed = sorted(r.charged_ps.get("collective_dp", 0) for r in slow.results)
    # The slow core's addition covers the gather; 2,019,688 - 1,828,571 on the other 15 pairs; its
    # partner waits until 125,000,000 + 2,285,714 + 2,019,688, from 103,657,142 on.
    assert exposed == [0, 191_117, 25_648_260]


def test_a_message_is_a_permute_of_its_bytes_between_two_stages() -> None:
    sent = Transfer(
        sent="y", received="x", source=1, target=2, writer="a", reader="b", num_bytes=77
    )
    call = message_call(sent)
    assert (call.kind, call.pairs, call.axes) == ("collective_permute", ((1, 2),), ("pp",))
    assert (call.dtype.bytes, call.source_shape, call.name) == (1, (1, 77, 1), "x")


# What code wants of its core, and what it loses for want of it.

MOVING = {"dma_in": 300, "dma_out": 150, "vector": 800}


def segments(*durations: int) -> tuple[Segment, ...]:
    """Segments of a function, the last of which moves nothing."""
    moved = (41, 41, 0)
    return tuple(
        Segment("compute", ps, ps // 2, MOVING if n else {}, n)
        for ps, n in zip(durations, moved, strict=True)
    )


def test_the_code_of_a_function_is_taken_as_one() -> None:
    """Alone on an even part 600 + 400 ps, with half of the engines 900 + 500, with the whole bank
    500 + 400, with half of the part 800 + 800. So each segment takes 1.4, 0.9 and 1.6 times as
    long; it wants 2 * 450 ps of 900 of the engines, and of HBM 82 bytes at 410 GB/s, 200 ps of 900.
    """
    points = (segments(600, 400, 50), segments(900, 500, 50), segments(500, 400, 50))
    at = (*points, segments(800, 800, 50))
    function = program([addition()]).functions[0]
    first, second, still = function_macros(function, TRN1N, ("p", 0), lambda f, t: at)
    assert isinstance(first, Stretch) and isinstance(second, Stretch) and isinstance(still, Stretch)
    assert (first.full_ps, first.half_ps, first.bank_ps, first.scarce_ps) == (600, 840, 540, 960)
    assert (second.full_ps, second.half_ps, second.bank_ps, second.scarce_ps) == (
        400,
        560,
        360,
        640,
    )
    assert first.demand == Demand(1.0, hbm=pytest.approx(200 / 900))
    assert (first.compute_ps, first.bank_cores, first.place) == (300, 2, ("p", 0))
    assert (still.full_ps, still.half_ps, still.bank_ps, still.scarce_ps) == (50, 50, 50, 50)
    assert still.demand == Demand(0.0)


def test_a_logical_core_of_two_has_twice_the_engines() -> None:
    """900 ps of engines of the 2 * 1000 both cores have; 82 bytes at 362.5 GB/s are 226.2 ps."""
    at = (segments(600, 400, 50),) * 4
    target = logical(load_target("trn2.48xlarge"), 2)
    function = program([addition()]).functions[0]
    first, *_ = function_macros(function, target, ("p", 0), lambda f, t: at)
    assert isinstance(first, Stretch)
    assert first.demand == Demand(0.45, hbm=pytest.approx(0.113103, rel=1e-5))
    assert (first.half_ps, first.bank_ps, first.scarce_ps) == (600, 600, 600)


def test_code_that_is_faster_alone_than_with_half_of_the_engines() -> None:
    """Half of the engines leave 800 ps of 1000, the whole bank 900: never less than that. Code that
    takes no engines loses none: with half of them it takes as long as with the whole bank."""
    function = program([addition()]).functions[0]
    own, bank, scarce = segments(600, 400, 50), segments(500, 400, 50), segments(800, 800, 50)
    at = (own, segments(400, 400, 50), bank, scarce)
    first, *_ = function_macros(function, TRN1N, ("p", 0), lambda f, t: at)
    assert isinstance(first, Stretch) and (first.half_ps, first.bank_ps) == (540, 540)
    still = [tuple(replace(s, busy_ps={}) for s in point) for point in (own, own, bank, scarce)]
    first, *_ = function_macros(function, TRN1N, ("p", 0), lambda f, t: still)
    assert isinstance(first, Stretch) and (first.half_ps, first.demand.dma) == (540, 0.0)


def test_a_copy_in_memory_at_all_points() -> None:
    """40 MB through 410 GB/s take 97,560.976 ns and 1300; 80 MB / 820, the engines' 77,265.882; at
    half of the engines 154,531.764; at half of the part 195,121.951. It wants more of HBM than an
    even part: 97,560.976 of 78,565.882."""
    there = AccessPattern(Space.HBM, 0, Affine(), ((1, 5_000_000),))
    kernel = Kernel(
        KernelProgram("compute", "copy"), [], [Instr("dma", Engine.DMA_IN, there, (there,))]
    )
    function = program([kernel]).functions[0]
    function.tensors = [Tensor("x", (5_000_000,), DType.F32, "input")]
    (found,) = function_macros(function, TRN1N)
    assert isinstance(found, Stretch)
    assert (found.full_ps, found.half_ps) == (98_860_976, 155_831_764)
    assert (found.bank_ps, found.scarce_ps) == (78_565_882, 196_421_951)
    assert found.demand == Demand(1.0, hbm=pytest.approx(1.241773, rel=1e-6))


def test_programs_receive_before_and_send_after_they_run() -> None:
    """Two runs of f, one of b. What is sent once goes after the last run and comes before the
    first; other stages' messages are not this one's."""

    def sent(name: str, source: int, target: int, once: bool = False) -> Transfer:
        return Transfer(
            sent=name,
            received=name,
            source=source,
            target=target,
            writer="f",
            reader="f",
            num_bytes=8,
            once=once,
        )

    transfers = [sent("in", 0, 1), sent("first", 0, 1, True), sent("out", 1, 2)]
    transfers += [sent("last", 1, 2, True), sent("other", 2, 3)]
    still = Stretch(1, 1, 0, Segment("compute", 1), "f")
    macros = schedule_macros({"f": [still], "b": []}, ((("f",), 2), (("b",), 1)), transfers, 1)
    names = [
        op.name if isinstance(op, Mark) else op.call.name if isinstance(op, Receive | Send) else ""
        for op in macros
    ]
    kinds = [type(op).__name__[0] for op in macros]
    # Receive, Mark, Stretch, Mark, Send
    assert "".join(kinds) == "RRMSMS" + "RMSMSS" + "MM"
    assert names == [
        *("in", "first", "f 0", "", "", "out"),
        *("in", "f 1", "", "", "out", "last"),
        *("b", ""),
    ]


def test_the_last_run_of_another_program_goes_on_with_the_messages_of_the_one_before() -> None:
    def sent(name: str, source: int, target: int, once: bool = False) -> Transfer:
        return Transfer(
            sent=name,
            received=name,
            source=source,
            target=target,
            writer="f",
            reader="f",
            num_bytes=8,
            once=once,
        )

    transfers = [sent("in", 0, 1), sent("first", 0, 1, True), sent("out", 1, 2)]
    transfers += [sent("last", 1, 2, True)]
    schedule = ((("f",), 1), (("f.last",), 1))
    macros = schedule_macros({"f": [], "f.last": []}, schedule, transfers, 1)
    names = [
        op.name if isinstance(op, Mark) else op.call.name
        for op in macros
        if isinstance(op, Mark | Receive | Send)
    ]
    assert names == [*("in", "first", "f", "", "out"), *("in", "f.last", "", "out", "last")]


def test_code_outside_of_programs_is_nowhere() -> None:
    """Of no program, and number -1, as a launch has it."""
    (stretch,) = function_macros(program([addition()]).functions[0], TRN1N)
    assert isinstance(stretch, Stretch)
    assert stretch.place == Wait(0).place == ("", -1)


def test_a_launch_is_charged_as_such() -> None:
    launch, *_ = program_macros(program([addition()]), TRN1N)
    assert isinstance(launch, Stretch)
    assert (launch.full_ps, launch.half_ps, launch.charge) == (100_000_000, 100_000_000, "launch")
    assert launch.demand == Demand(0.0)
