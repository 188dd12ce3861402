"""Times of kernels and functions on one core, worked out by hand.

On trn1n: Vector at 1.12 GHz, 16 DMA engines of 17 GB/s and 1300 ns per transfer, 60 cycles to reach
SBUF (pages of the kernel interface), 410 GB/s of HBM per core (820 per chip), 100 ns until another
engine sees a semaphore (default). On trn2: 23 GB/s per engine, 2900 / 8 = 362.5 GB/s of HBM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor
from shardwright.compiler.isa.program import (
    AccessPattern,
    Border,
    CollectiveCall,
    Engine,
    Function,
    Instr,
    Kernel,
    Loop,
    Space,
    Tile,
)
from shardwright.compiler.machine.target import Target, load_target, logical
from shardwright.compiler.timing.evaluate import (
    EngineSpan,
    KernelTime,
    Segment,
    Shares,
    engine_spans,
    function_segments,
    instr_costs,
    kernel_times,
    oracle_ps,
    segments_at,
)
from shardwright.compiler.timing.max_plus import merged
from tests.support.kernel_checks import kernel_time

TRN1N = load_target("trn1n.32xlarge")
TRN2 = logical(load_target("trn2.48xlarge"), 2)
NOWHERE = Affine()
TENSORS = [Tensor(name, (5_000_000,), DType.F32, "input") for name in "ab"]
TILES = [Tile("t", Space.SBUF, 128, 1024, DType.F32)]
ROWS = AccessPattern(Space.HBM, 0, NOWHERE, ((1024, 128), (1, 1024)))
HELD = AccessPattern(Space.SBUF, 0, NOWHERE, ((1, 128), (1, 1024)))
MUCH = AccessPattern(Space.HBM, 0, NOWHERE, ((1, 5_000_000),))
THERE = replace(MUCH, buffer=1)

# 128 rows of 4096 B, 8 per engine: 8 * (4096 + 140) / 17 = 1993.412 ns; 128 * 4096 B = 524,288 B.
LOAD = Instr("dma", Engine.DMA_IN, HELD, (ROWS,))
STORE = Instr("dma", Engine.DMA_OUT, ROWS, (HELD,))
MOVE_PS, MOVED_BYTES = 1_993_412, 524_288
# 2 * 1024 cycles / 1.12 GHz; then 60 cycles / 1.12 = 53.571 ns
ADD = Instr("tensor_tensor", Engine.VECTOR, HELD, (HELD, HELD), {"op": "add"})
ADD_PS, REACH_PS = 1_828_571, 53_571
FIXED_PS, SEEN_PS = 1_300_000, 100_000
COPY = Instr("dma", Engine.DMA_IN, THERE, (MUCH,))  # 20 MB


def kernel(*body: Instr | Loop, tokens: tuple[int, ...] = (), kind: str = "compute") -> Kernel:
    """A kernel behind a barrier."""
    return Kernel(KernelProgram(kind, "r"), list(TILES), list(body), tokens)


def timed(one: Kernel, target: Target = TRN1N) -> KernelTime:
    return kernel_time(one, TENSORS, target)


def cost(instr: Instr, target: Target = TRN1N) -> tuple[int, int]:
    (found,) = instr_costs([instr], kernel(), TENSORS, target)
    return found


def test_a_transfer_takes_as_long_as_its_engines_or_its_memory_whichever_is_slower() -> None:
    """20 MB in HBM are read and written: 40 MB / 410 GB/s = 97,560.976 ns, where the engines take
    20 * 65676 / 17 = 77,265.882. On trn2 110,344.828 against 57,109.565. A load is read alone:
    524,288 / 410 = 1278.75 ns, less than the engines' 1993.412."""
    assert cost(COPY) == (97_560_976, FIXED_PS)
    assert cost(COPY, TRN2) == (110_344_828, FIXED_PS)
    assert cost(LOAD) == cost(STORE) == (MOVE_PS, FIXED_PS)
    whole = replace(TRN1N, hbm_bytes_per_s_per_core=820e9)
    assert cost(COPY, whole) == (77_265_882, FIXED_PS)


def test_a_cast_reads_and_writes_bytes_of_different_widths() -> None:
    """5,000,000 fp32 are read, as many bf16 written: 20 MB + 10 MB."""
    narrow = [TENSORS[0], replace(TENSORS[1], dtype=DType.BF16)]
    assert kernel_time(kernel(COPY), narrow, TRN1N).hbm_bytes == 30_000_000
    assert instr_costs([COPY], kernel(), narrow, TRN1N)[0][0] == 77_265_882  # 30 / 410 = 73,170.7


def test_shares_of_engines_and_of_memory() -> None:
    """Half of the engines take twice as long, 3,986.824 ns; a tenth of HBM 524,288 / 41 =
    12,787.512; both the longer one. The copy at half of the engines takes 154,531.765."""
    points = (Shares(), Shares(0.5), Shares(hbm=0.1), Shares(0.5, 0.1), Shares(hbm=0.99))
    found = [t.duration_ps - FIXED_PS for t in kernel_times(kernel(LOAD), TENSORS, TRN1N, points)]
    assert found == [MOVE_PS, 3_986_824, 12_787_512, 12_787_512, MOVE_PS]
    (half,) = kernel_times(kernel(COPY), TENSORS, TRN1N, (Shares(0.5),))
    assert half.busy_ps == {"dma_in": 154_531_764}


def test_an_instruction_of_an_engine() -> None:
    """Its interval, then 60 cycles, and 100 ns for who waits for it."""
    assert cost(ADD) == (ADD_PS, 153_571)
    assert timed(kernel(ADD)) == KernelTime("r", 1_882_142, {"vector": ADD_PS}, ADD_PS, 0)
    # Scalar: 1024 / 1.4 GHz = 731.429 ns, 60 / 1.4 = 42.857
    scaled = Instr("activation", Engine.SCALAR, HELD, (HELD,), {"func": "identity"})
    assert cost(scaled) == (731_429, 142_857)


def chain_of_three(loads: int = 1) -> Kernel:
    """Load, add, store, each after the other."""
    add = replace(ADD, waits=(0,), signals=(1,))
    return kernel(
        *[replace(LOAD, signals=(0,))] * loads, add, replace(STORE, waits=(1,)), tokens=(0, 0)
    )


def test_a_load_an_addition_and_a_store() -> None:
    """1,993,412 + 1,300,000; + 1,828,571 + 53,571 + 100,000; + 1,993,412 + 1,300,000."""
    wanted = KernelTime(
        "r",
        8_568_966,
        {"dma_in": MOVE_PS, "vector": ADD_PS, "dma_out": MOVE_PS},
        ADD_PS,
        2 * MOVED_BYTES,
    )
    assert timed(chain_of_three()) == wanted
    assert kernel_time(chain_of_three(), TENSORS, TRN1N, recorded=False) == replace(
        wanted, compute_ps=0
    )


def test_code_is_chosen_beside_neighbours_and_collectives() -> None:
    """They fill half of its stalls and leave it three quarters of the DMA queues, which need
    2 x 1,993,412 / 0.75 = 5,315,766 then; half of the other 4,582,142 is filled."""
    assert oracle_ps(chain_of_three(), TENSORS, TRN1N) == 5_315_766 + 2_291_071


@pytest.mark.parametrize(
    ("share", "wanted"),
    # Loads and stores are one engine: 2 * 1,993,412 = 3,986,824 of 8,568,966; 4,582,142 are left.
    [(0.0, 8_568_966), (0.5, 6_277_895), (0.25, 7_423_430), (1.0, 3_986_824)],
)
def test_neighbours_fill_a_share_of_what_no_engine_is_busy(share: float, wanted: int) -> None:
    target = replace(TRN1N, core=replace(TRN1N.core, stall_recovery=share))
    assert timed(chain_of_three(), target).duration_ps == wanted
    busy = timed(kernel(*[ADD] * 3), target)  # the busiest engine cannot be filled
    assert busy.duration_ps == 3 * ADD_PS + REACH_PS - round(share * REACH_PS)
    (segment,) = function_segments(function([chain_of_three()]), target)
    assert segment.duration_ps == wanted


def test_what_is_busy_longer_than_the_kernel_lasts_bounds_its_compute_time() -> None:
    """Fully recovered, a kernel of loads and an addition lasts as long as its loads."""
    target = replace(TRN1N, core=replace(TRN1N.core, stall_recovery=1.0))
    time = timed(chain_of_three(), target)
    assert (time.duration_ps, time.compute_ps) == (3_986_824, ADD_PS)


def test_loads_and_stores_share_the_engines() -> None:
    """Side by side on their queues they would take 3,293,412; the engines need 3,986,824."""
    assert timed(kernel(LOAD, STORE)).duration_ps == 3_986_824
    assert timed(kernel(LOAD)).duration_ps == 3_293_412


def test_loops_run_as_often_as_they_say() -> None:
    """Seven additions, then 3 * 4 loads: 7 * 1,828,571 + 53,571; 12 * 1,993,412 + 1,300,000."""
    seven = timed(kernel(Loop(0, 7, [ADD])))
    assert (seven.duration_ps, seven.compute_ps) == (12_853_568, 12_799_997)
    assert seven.busy_ps == {"vector": 12_799_997}
    nest = timed(kernel(Loop(0, 3, [Loop(1, 4, [LOAD])])))
    assert (nest.duration_ps, nest.busy_ps) == (25_220_944, {"dma_in": 23_920_944})
    assert nest.hbm_bytes == 12 * MOVED_BYTES


def test_a_loop_of_two_engines_goes_at_the_pace_of_the_slower() -> None:
    """Two slots: a load waits for the addition before the last one. Odd loads start every
    1,993,412 + 1,300,000 + 1,828,571 + 153,571 = 5,275,554, even ones 1,993,412 later; after the
    start of the eighth, at 3 * 5,275,554 + 1,993,412, comes one such period more.
    """
    body = [replace(LOAD, waits=(1,), signals=(0,)), replace(ADD, waits=(0,), signals=(1,))]
    found = timed(kernel(Loop(0, 8, body), tokens=(0, 2)))
    assert found.duration_ps == 23_095_628
    assert found.compute_ps == 8 * ADD_PS


# Functions of one physical core.


def function(*subgraphs: Sequence[Kernel], calls: Sequence[CollectiveCall] = ()) -> Function:
    """A function of one or two physical cores."""
    partner = list(subgraphs[1]) if len(subgraphs) > 1 else None
    return Function(
        "f", TENSORS, (0,), (1,), (), 0, list(subgraphs[0]), list(calls), partner=partner
    )


def event(kind: str) -> Kernel:
    return Kernel(KernelProgram(kind, kind, attrs={"collective": 0}))


def test_kernels_behind_barriers_add_up_and_collectives_cut() -> None:
    """Two additions and a register (a DMA of 4 bytes: 1,300,000) before a collective, one between
    start and wait, none after."""
    register = kernel(kind="register_load")
    gather = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
    kernels = [kernel(ADD), register, kernel(ADD), event("collective_start"), kernel(LOAD)]
    found = function_segments(function([*kernels, event("collective_wait")], calls=[gather]), TRN1N)
    assert [s.kind for s in found] == ["compute", "start", "compute", "wait"]
    first, start, second, wait = found
    assert (first.duration_ps, first.compute_ps) == (2 * 1_882_142 + 1_300_000, 2 * ADD_PS)
    assert (first.busy_ps, first.hbm_bytes) == ({"vector": 2 * ADD_PS}, 4)
    assert [k.duration_ps for k in first.kernels] == [1_882_142, 1_300_000, 1_882_142]
    assert (start.collective, wait.collective, first.collective) == (0, 0, -1)
    assert (second.duration_ps, second.hbm_bytes) == (3_293_412, MOVED_BYTES)
    assert start == Segment("start", collective=0)
    assert (start.duration_ps, start.compute_ps, start.hbm_bytes) == (0, 0, 0)


def test_a_kernel_that_waits_for_less_than_a_barrier_begins_earlier() -> None:
    """Behind a barrier a load and then an addition take 3,293,412 + 1,882,142. Without one the
    addition runs beside the load; where it waits for the loads, they have finished as soon as they
    are done, and where loads wait for an addition, 100 ns pass until they see it."""
    free = replace(kernel(ADD), borders=())
    waits = replace(kernel(replace(ADD, borders=(0,))), borders=(Border(Engine.DMA_IN, 1),))
    apart = function_segments(function([kernel(LOAD), kernel(ADD)]), TRN1N)
    assert apart[0].duration_ps == 3_293_412 + 1_882_142
    (beside,) = function_segments(function([kernel(LOAD), free]), TRN1N)
    assert beside.duration_ps == 3_293_412
    assert [k.duration_ps for k in beside.kernels] == [3_293_412, 0]
    (behind,) = function_segments(function([kernel(LOAD), waits]), TRN1N)
    assert behind.duration_ps == 3_293_412 + 1_882_142
    back = replace(kernel(replace(LOAD, borders=(0,))), borders=(Border(Engine.VECTOR, 1),))
    (seen,) = function_segments(function([kernel(ADD), back]), TRN1N)
    assert seen.duration_ps == 1_882_142 + 100_000 + 3_293_412


# Two physical cores of a logical one, on trn2: 600 / 0.96 GHz per 300 elements.
ADD2_PS, REACH2_PS = 2_133_333, 62_500  # 2048 / 0.96; 60 / 0.96
IDLE = kernel(kind="idle")


def test_both_cores_take_as_long_as_the_slower_one() -> None:
    """Three additions beside one: the busy times are sums, the time of any engine the larger."""
    (found,) = function_segments(function([kernel(*[ADD] * 3)], [kernel(ADD)]), TRN2)
    assert found.duration_ps == 3 * ADD2_PS + REACH2_PS
    assert found.busy_ps == {"vector": 4 * ADD2_PS}
    assert (found.compute_ps, found.lone_ps) == (3 * ADD2_PS, 0)


def test_stalls_of_both_cores_are_filled_as_far_as_the_busier_one_allows() -> None:
    """Three additions beside one: what is left of the stall of 62,500 at the end is a half, none
    where all of it is filled; the core of one addition waits for the other, and fills nothing."""
    kernels = [kernel(*[ADD] * 3)], [kernel(ADD)]
    for share, left in ((0.5, REACH2_PS // 2), (1.0, 0)):
        target = replace(TRN2, core=replace(TRN2.core, stall_recovery=share))
        (found,) = function_segments(function(*kernels), target)
        assert found.duration_ps == 3 * ADD2_PS + left
        (turned,) = function_segments(function(*reversed(kernels)), target)
        assert turned.duration_ps == found.duration_ps and turned.lone_ps == 0


def test_what_a_core_computes_beside_its_own_earlier_loads_is_no_time_of_the_next_kernel() -> None:
    """Core 1 adds while its load of before is under way, and ends no later; core 0 loads once more
    meanwhile: a kernel of a load, in which nothing that anybody computes takes any time."""
    free = replace(kernel(ADD), borders=())
    (found,) = function_segments(
        function([kernel(LOAD), kernel(LOAD)], [kernel(*[LOAD] * 2), free]), TRN2
    )
    first, second = found.kernels
    assert first.compute_ps == second.compute_ps == 0 < second.duration_ps
    assert second.busy_ps["vector"] == ADD2_PS


def test_a_core_alone_has_the_whole_bank() -> None:
    """40 MB / 362.5 GB/s = 110,344.828 ns beside another copy; alone 2 * 362.5 GB/s leave the
    engines' 57,109.565 as the longer."""
    (both,) = function_segments(function([kernel(COPY)], [kernel(COPY)]), TRN2)
    (alone,) = function_segments(function([kernel(COPY)], [IDLE]), TRN2)
    assert both.duration_ps == 110_344_828 + FIXED_PS and both.lone_ps == 0
    assert alone.duration_ps == alone.lone_ps == 57_109_565 + FIXED_PS
    assert both.hbm_bytes == 80_000_000 and alone.hbm_bytes == 40_000_000


def test_a_kernel_that_waits_for_the_other_core_starts_100_ns_after_it() -> None:
    """Core 1 adds once and then waits for the three additions of core 0."""
    waits = replace(kernel(ADD), after=1)
    first = [kernel(*[ADD] * 3), kernel(ADD)]
    (found,) = function_segments(function(first, [kernel(ADD), waits]), TRN2)
    assert found.duration_ps == 3 * ADD2_PS + REACH2_PS + SEEN_PS + ADD2_PS + REACH2_PS
    (free,) = function_segments(function(first, [kernel(ADD), kernel(ADD)]), TRN2)
    assert free.duration_ps == 4 * ADD2_PS + 2 * REACH2_PS


def test_engines_behind_a_collective_wait_for_the_kernels_behind_it() -> None:
    """Core 1 waits for the three additions of core 0 behind the collective; clocks begin there."""
    event = kernel(kind="collective_wait")
    waits = replace(kernel(ADD), after=3)
    first = [kernel(ADD), event, kernel(*[ADD] * 3), kernel(ADD)]
    spans = list(engine_spans(function(first, [kernel(ADD), event, kernel(ADD), waits]), TRN2))
    assert spans[1] == [{}, {}]
    begin = 3 * ADD2_PS + REACH2_PS + SEEN_PS
    assert spans[3][1] == {"vector": EngineSpan(begin, begin + ADD2_PS + REACH2_PS, ADD2_PS)}


def test_points_of_a_function_are_evaluated_each() -> None:
    """At half of the engines a load takes 3,986,824 + 1,300,000, an addition as long as before."""
    both = function([kernel(LOAD), kernel(ADD)])
    (one,), (half,) = segments_at(both, TRN1N, (Shares(), Shares(0.5)))
    assert one.duration_ps == 3_293_412 + 1_882_142
    assert half.duration_ps == 5_286_824 + 1_882_142


def test_waits_and_signals_of_their_own_take_no_time() -> None:
    """A queue that waits for a load and then adds: 3,293,412 + 1,882,142; at half of the engines
    5,286,824 + 1,882,142. Signals of a bare instruction are seen at once."""
    wait = Instr("wait", Engine.VECTOR, None, waits=(0,))
    tell = Instr("signal", Engine.VECTOR, None, signals=(1,))
    after = replace(ADD, engine=Engine.GPSIMD, waits=(1,))
    points = (Shares(), Shares(0.5))
    one = kernel(replace(LOAD, signals=(0,)), wait, ADD, tokens=(0, 0))
    found = [t.duration_ps for t in kernel_times(one, TENSORS, TRN1N, points)]
    assert found == [5_175_554, 7_168_966]
    assert timed(kernel(tell, after, tokens=(0, 0))).duration_ps == 838_571 + 42_857


def test_time_with_any_engine_busy_counts_what_overlaps_once() -> None:
    """An addition on Vector beside one on GpSimd, (150 + 1024) / 1.4 GHz = 838.571 ns; one after
    the other they add up, but to no more than the kernel lasts without its stalls."""
    beside = replace(ADD, engine=Engine.GPSIMD)
    assert timed(kernel(ADD, beside)).compute_ps == ADD_PS
    chained = kernel(
        replace(ADD, signals=(0,)), replace(beside, waits=(0,), signals=(1,)), tokens=(0, 0)
    )
    assert timed(chained).compute_ps == ADD_PS + 838_571
    target = replace(TRN1N, core=replace(TRN1N.core, stall_recovery=1.0))
    found = timed(chained, target)
    assert (found.duration_ps, found.compute_ps) == (ADD_PS, ADD_PS)


def test_a_kernel_that_ends_no_later_has_no_stall_and_no_compute_of_its_own() -> None:
    """Fully recovered, a load of 1,993,412 with an addition beside it that ends before the load."""
    target = replace(TRN1N, core=replace(TRN1N.core, stall_recovery=1.0))
    free = replace(kernel(ADD), borders=())
    (found,) = function_segments(function([kernel(LOAD), free]), target)
    assert [(k.duration_ps, k.compute_ps) for k in found.kernels] == [(MOVE_PS, 0), (0, 0)]
    assert (found.duration_ps, found.compute_ps) == (MOVE_PS, 0)


def test_an_idle_kernel_counts_on_the_way_back() -> None:
    """Core 1 loads for the addition of its kernel before the idle one: 100 ns after it."""
    waits = replace(kernel(replace(LOAD, borders=(0,))), borders=(Border(Engine.VECTOR, 2),))
    first = [IDLE, kernel(ADD), IDLE]
    (found,) = function_segments(function(first, [kernel(ADD), IDLE, waits]), TRN2)
    # 8 * 4236 / 23 = 1473.391; core 0 does one addition meanwhile
    assert found.duration_ps == ADD2_PS + REACH2_PS + SEEN_PS + 1_473_391 + FIXED_PS
    assert found.lone_ps == found.duration_ps


def test_a_loop_that_waits_once_is_not_taken_for_one_that_always_waits() -> None:
    """A load, 3,293,412; beside it an addition, until 1,828,571, and five more that wait for the
    load: 3,293,412 + 5 * 1,828,571 + 53,571. No kernel computes for longer than it lasts."""
    inside = Loop(0, 5, [replace(ADD, borders=(0,))])
    waits = replace(kernel(ADD, inside), borders=(Border(Engine.DMA_IN, 1),))
    (found,) = function_segments(function([kernel(LOAD), waits]), TRN1N)
    assert found.duration_ps == 12_489_838
    assert found.compute_ps == found.kernels[1].duration_ps == 9_196_426


def test_what_waits_for_engines_that_are_shared_waits_longer() -> None:
    """A load and a store at once take 3,986,824, 693,412 more than either queue: by so much later
    everything has finished, for who waits for the loads as well."""
    waits = replace(kernel(replace(ADD, borders=(0,))), borders=(Border(Engine.DMA_IN, 1),))
    (found,) = function_segments(function([kernel(LOAD, STORE), waits]), TRN1N)
    assert found.duration_ps == 3_986_824 + 1_882_142
    # The engines are free again from then on: another load and store take as long.
    pair = replace(kernel(LOAD, STORE), borders=())
    (twice,) = function_segments(function([kernel(LOAD, STORE), pair]), TRN1N)
    assert twice.duration_ps == 2 * 3_986_824
    # Engines that rested until an addition had finished begin their time then.
    late = replace(
        kernel(replace(LOAD, borders=(0,)), replace(STORE, borders=(0,))),
        borders=(Border(Engine.VECTOR, 1),),
    )
    (rested,) = function_segments(function([kernel(LOAD), kernel(ADD), late]), TRN1N)
    assert rested.duration_ps == 3_293_412 + 1_882_142 + 100_000 + 3_986_824


def test_a_register_is_loaded_behind_everything() -> None:
    """A load beside which nothing else runs: 3,293,412, 1,300,000 for the register, an addition."""
    register = kernel(kind="register_load")
    free = replace(kernel(ADD), borders=())
    (found,) = function_segments(function([kernel(LOAD), register, free]), TRN1N)
    assert found.duration_ps == 3_293_412 + 1_300_000 + 1_882_142


def test_time_with_an_engine_busy_in_loops_of_two() -> None:
    """Seven additions by Vector, each followed by one of GpSimd, 838,571: side by side with the
    next one where two may be open, one after the other where one."""
    by_vector = replace(ADD, waits=(1,), signals=(0,))
    by_gpsimd = replace(ADD, engine=Engine.GPSIMD, waits=(0,), signals=(1,))
    apart = timed(kernel(Loop(0, 7, [by_vector, by_gpsimd]), tokens=(0, 1)))
    assert apart.compute_ps == 7 * (ADD_PS + 838_571)
    beside = timed(kernel(Loop(0, 7, [by_vector, by_gpsimd]), tokens=(0, 2)))
    assert beside.compute_ps == 7 * ADD_PS + 838_571


def test_intervals_that_touch_are_one_and_empty_ones_are_none() -> None:
    assert merged([(5, 7), (1, 2), (2, 4), (6, 6), (9, 9)]) == [(1, 4), (5, 7)]
    assert merged([]) == []
