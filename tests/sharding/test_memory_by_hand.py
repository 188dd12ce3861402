"""Bytes of a core, worked out by hand: named buffers, arenas and scratch of linked programs, their
peak and their categories."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import TensorType, tensor_type
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Node, Tensor, View
from shardwright.compiler.isa.program import (
    Call,
    CollectiveCall,
    Engine,
    Function,
    Instr,
    Kernel,
    Loop,
    Program,
    ProgramBuffer,
    Repeat,
)
from shardwright.compiler.linking import budget
from shardwright.compiler.linking.residency import (
    CallMoment,
    Residency,
    gathered_tensors,
    scratch_peak,
)
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.compiler.schedule.hbm import (
    Lifetime,
    aligned,
    check,
    liveness_bound,
    placed_from,
    plan,
)
from shardwright.sharding.memory.footprint import (
    CATEGORIES,
    OF_SOME,
    Footprint,
    check_limit,
    compiled_footprints,
    footprints,
    worst_stage,
)

F32, BF16, U8 = DType.F32, DType.BF16, DType.U8


def touching(op: str, *tensors: int) -> Kernel:
    """A kernel that loads or stores tensors."""
    nodes = [Node(op, (), (), F32, {"view": View(t, Affine(), ())}) for t in tensors]
    return Kernel(KernelProgram("compute", f"{op} {tensors}", (), tuple(nodes)))


def gathering(source: int, target: int) -> list[Kernel]:
    """A collective from its start to its wait."""
    start = {"collective": 0, "source": source, "target": target}
    return [
        Kernel(KernelProgram("collective_start", "start", attrs=start)),
        Kernel(KernelProgram("collective_wait", "wait", attrs={"collective": 0})),
    ]


def scratch(size: int) -> Tensor:
    return Tensor("s", (size,), U8, "scratch", offset_bytes=0)


GATHER = CollectiveCall("all_gather", ("dp",), U8, (1, 1, 1))


def layer() -> Function:
    """Input 0 of 100 B, output 1 of 200; scratch 2 of 1000 B is made in kernel 0 and read in 2; 3
    of 500 B is gathered by kernels 1 and 2, read in 3; 4 of 600 B lives in 3 alone; a constant. A
    zone of 1700 B."""
    tensors = [
        Tensor("i", (100,), U8, "input"),
        Tensor("o", (200,), U8, "output"),
        scratch(1000),
        scratch(500),
        scratch(600),
        Tensor("c", (25,), F32, "constant", data=b"0" * 100),
    ]
    start, wait = gathering(0, 3)
    kernels = [
        touching("store", 2),
        start,
        wait,
        touching("load", 2),
        touching("load", 3, 4),
    ]
    return Function("layer", tensors, (0,), (1,), (), 0, kernels, [GATHER], 1700)


def collect() -> Function:
    """Gathers input 0 into output 1."""
    tensors = [Tensor("i", (100,), U8, "input"), Tensor("o", (400,), U8, "output")]
    return Function("collect", tensors, (0,), (1,), (), 0, gathering(0, 1), [GATHER])


def linked(name: str, *steps: Call | Repeat) -> Program:
    """Arena buffers 1 of 100 B, 2 of 300 and 3 of 400 around named ones; an arena of 3072 B."""
    buffers = [
        ProgramBuffer("w", (64,), F32, "named"),
        ProgramBuffer("", (100,), U8, "arena", 0),
        ProgramBuffer("", (75,), F32, "arena", 256),
        ProgramBuffer("", (200,), BF16, "arena", 768),
    ]
    functions = [layer(), collect()]
    return Program(name, "t", functions, buffers, (), (), steps, 3072)


MADE, USED, DONE = Call(0, (0,), (1,)), Call(1, (1,), (3,)), Call(0, (3, 1), (2,))


def test_the_busiest_kernel_of_a_function() -> None:
    """In kernels 1 to 3 scratch 2 and 3 are both live, 1500 B; in the last one 3 and 4, 1100 B. An
    input takes no scratch."""
    found = scratch_peak(layer())
    assert (found.num_bytes, set(found.tensors)) == (1500, {2, 3})
    assert scratch_peak(collect()).num_bytes == 0
    assert gathered_tensors(layer()) == {3} and gathered_tensors(collect()) == {1}
    stored = layer()
    stored.kernels.append(touching("store", 3))  # what writes last decides
    assert gathered_tensors(stored) == frozenset()


def test_what_is_live_call_by_call() -> None:
    """The first call makes buffer 1 (100 B); the second gathers it into 3 (400 B); the third reads
    both and makes 2 (300 B), 1500 B of scratch, 500 of them gathered, beside 0 and 400; its zone
    of 1700 B is 1792 with its alignment."""
    found = Residency(linked("forward", MADE, USED, DONE))
    assert found.moments == (
        CallMoment("layer", 1, 100, 1500, 500),
        CallMoment("collect", 1, 500, 0, 400),
        CallMoment("layer", 1, 800, 1500, 900),
    )
    assert [m.live_bytes for m in found.moments] == [1600, 500, 2300]
    assert (found.peak, found.bound_bytes) == (2, 256 + 512 + 512 + 1792)
    held = sorted((r.num_bytes, r.gathered) for r in found.at_peak())
    assert held == [(100, False), (300, False), (400, True), (500, True), (1000, False)]


def test_calls_of_loops_count_once_and_say_how_often() -> None:
    """What an iteration reads at its start, the one before leaves: buffer 1 lives all through."""
    nest = Repeat(0, 3, (Call(0, (1,), (2,)), Repeat(1, 4, (Call(1, (2,), (1,)),))))
    found = Residency(linked("forward", MADE, nest))
    assert [(m.function, m.repeats, m.arena_bytes) for m in found.moments] == [
        ("layer", 1, 100),
        ("layer", 3, 400),
        ("collect", 12, 400),
    ]


def test_nothing_is_live_in_a_program_without_calls() -> None:
    found = Residency(linked("forward"))
    assert (found.peak, found.bound_bytes, found.at_peak()) == (-1, 0, [])


def test_constants_count_as_they_lie_in_the_file() -> None:
    assert linked("forward").constant_bytes == 100


def info(name: str, role: str, kind: TensorType, **more: Any) -> BufferInfo:
    axes = ((),) * kind.rank
    return BufferInfo(name=name, role=role, local_type=kind, global_type=kind, axes=axes, **more)


def two_stages() -> StepPlan:
    """Stage 0 runs `forward.0` and `backward.0`, stage 1 `update.1`; three micro-batches."""
    b = Builder()
    graph = b.finish(b.op("sine", b.input((64,))))
    kinds = {
        "w": info("w", "parameter", tensor_type((64,), F32), stages=(0,)),
        "m": info("m", "optimizer", tensor_type((64,), F32), stages=(1,)),
        "g": info("g", "gradient", tensor_type((64,), BF16)),
        "r": info("r", "residual", tensor_type((32,), F32), stages=(1, 0), slots=(1, 3)),
        "x": info("x", "batch", tensor_type((8,), DType.I32), stages=(0,), slots=(9,)),
        "seed": info("seed", "rng", tensor_type((2,), DType.U32)),
    }
    names = {"forward.0": 0, "backward.0": 0, "update.1": 1}
    programs = [
        StepProgram(name=name, graph=graph, inputs=("seed",), outputs=("g",), stage=stage)
        for name, stage in names.items()
    ]
    schedules = (((("forward.0", "backward.0"), 3),), ((("update.1",), 1),))
    return StepPlan(
        mesh={"pp": 2},
        buffers=kinds,
        programs=tuple(programs),
        schedules=schedules,
        num_microbatches=3,
    )


def compiled() -> tuple[Footprint, ...]:
    programs = [
        linked("forward.0", MADE),
        linked("backward.0", MADE, USED, DONE),
        linked("update.1", Call(1, (0,), (3,))),
    ]
    programs[0].arena_bytes = 2212
    programs[2].arena_bytes = 1024
    return compiled_footprints(two_stages(), [Residency(p) for p in programs])


def test_named_buffers_of_every_stage() -> None:
    """w 256 B, m 256, g 128, r 128 in three slots or one, x 32 for each of three micro-batches, a
    seed of 8, and 100 B of constants per program."""
    first, second = compiled()
    assert first.argument_bytes == {
        "parameters": 256,
        "gradients": 128,
        "optimizer": 0,
        "activations": 384,
        "gathered": 0,
        "scratch": 0,
        "other": 96 + 8 + 200,
    }
    assert second.argument_bytes == {
        "parameters": 0,
        "gradients": 128,
        "optimizer": 256,
        "activations": 128,
        "gathered": 0,
        "scratch": 0,
        "other": 8 + 100,
    }


def test_the_peak_of_every_stage() -> None:
    """Stage 0: backward reserves 3072 B and holds 2300, 900 of them gathered, so 772 more
    are scratch. Stage 1: update reserves 1024, holds 400, all of them gathered."""
    first, second = compiled()
    assert first.arena_bytes == {"forward.0": 2212, "backward.0": 3072}
    assert first.peak_program == "backward.0"
    assert first.categories == {
        "parameters": 256,
        "gradients": 128,
        "optimizer": 0,
        "activations": 384 + 1400,
        "gathered": 900,
        "scratch": 772,
        "other": 304,
    }
    assert first.peak_bytes == 256 + 128 + 384 + 304 + 3072
    assert second.peak_bytes == 128 + 256 + 128 + 108 + 1024
    assert (second.categories["gathered"], second.categories["scratch"]) == (400, 624)
    assert worst_stage([second, first]) is first is worst_stage([first, second])
    assert not first.estimated
    assert [*first.categories] == [c for c in CATEGORIES if c not in OF_SOME]
    assert [h.num_bytes for h in first.held][:3] == [1000, 500, 400]
    assert all(h.num_bytes for h in first.held)
    # Every position has what is around it: 1072 B, and its own.
    assert [m.live_bytes for m in first.timeline] == [2672, 2672, 1572, 3372]
    assert [m.categories["gathered"] for m in first.timeline] == [500, 500, 400, 900]


def test_before_compiling_named_buffers_are_the_same() -> None:
    """Graphs here read and write named buffers alone; there are no constants yet."""
    first, second = footprints(two_stages())
    assert first.argument_bytes["other"] == 104 and second.argument_bytes["other"] == 8
    assert (first.peak_bytes, second.peak_bytes) == (256 + 128 + 384 + 104, 128 + 256 + 128 + 8)
    assert first.estimated and set(first.arena_bytes) == {"forward.0", "backward.0"}


def test_the_limit_holds_at_its_value() -> None:
    (first, _), most = compiled(), 4144
    check_limit(first, most, "")
    with pytest.raises(
        CapacityError, match=r"requires 0.000 GiB \(4144 bytes\), the limit"
    ) as error:
        check_limit(first, most - 1, "use less")
    assert str(error.value).partition("largest: ")[2].count("; ") == 4  # five are named
    assert str(error.value).endswith("help: use less")


# Arenas.


def test_buffers_lie_on_multiples_of_256() -> None:
    assert [aligned(size) for size in (0, 1, 256, 257)] == [0, 256, 256, 512]
    placed, end = placed_from(100, [scratch(10), scratch(300), scratch(1)])
    assert [t.offset_bytes for t in placed] == [256, 512, 1024] and end == 1025
    assert placed_from(100, []) == ([], 100)


def test_the_bound_and_a_plan_at_it() -> None:
    """256 + 512 + 256 at step 2; the last one takes the place of the first."""
    lives = [
        Lifetime(200, 0, 2),
        Lifetime(512, 1, 4),
        Lifetime(10, 2, 2),
        Lifetime(256, 3, 5),
    ]
    assert liveness_bound(lives) == 1024
    offsets, size = plan(lives)
    assert size == 1024 and not check(lives, offsets, size)
    assert liveness_bound([]) == 0


def test_the_smallest_gap_that_fits_is_taken() -> None:
    """Beside 1024 B all the time, gaps of 768 and 512 B come free; 500 B go into the second."""
    lives = [
        Lifetime(2048, 0, 9),
        Lifetime(1024, 0, 9),
        Lifetime(768, 0, 4),
        Lifetime(600, 0, 9),
        Lifetime(512, 0, 4),
        Lifetime(300, 0, 9),
        Lifetime(250, 5, 9),
    ]
    offsets, size = plan(lives)
    assert size == liveness_bound(lives) == 2048 + 1024 + 768 + 768 + 512 + 512
    assert offsets[6] == offsets[4]


@pytest.mark.parametrize(
    ("lives", "offsets", "size", "wrong"),
    [
        ([Lifetime(256, 0, 1), Lifetime(256, 1, 2)], [0, 256], 512, 0),
        ([Lifetime(256, 0, 1), Lifetime(256, 1, 2)], [0, 0], 512, 1),
        ([Lifetime(257, 0, 1), Lifetime(256, 1, 2)], [0, 256], 512, 1),
        ([Lifetime(256, 0, 1), Lifetime(256, 2, 3)], [0, 0], 256, 0),
        ([Lifetime(256, 0, 1)], [0], 255, 1),
        ([Lifetime(256, 0, 1)], [-256], 256, 1),
        ([Lifetime(256, 0, 1)], [128], 512, 1),
        ([Lifetime(0, 0, 9), Lifetime(256, 0, 1)], [0, 0], 256, 0),
    ],
)
def test_what_a_plan_must_keep(
    lives: list[Lifetime], offsets: list[int], size: int, wrong: int
) -> None:
    assert len(check(lives, offsets, size)) == wrong


# The budget of a program.


def test_the_split_of_a_program() -> None:
    """One constant of 100 B, a named buffer of 256, of an arena of 3072 the largest zone and the
    rest."""
    made = linked("p", MADE)
    memory = budget.check_program_memory(made, 3428)
    assert memory == budget.Memory(constants=100, io=256, intermediates=1372, scratch=1700)
    assert memory.total == 3428
    with pytest.raises(CapacityError, match="NCC_EOOM001"):
        budget.check_program_memory(made, 3427)


def test_instructions_of_loops_count_unrolled_or_once() -> None:
    """2 + 3 * (1 + 5 * 2) = 35; 2 + 1 + 2 = 5."""
    one = Instr("memset", Engine.VECTOR, None)
    body = [one, Loop(0, 3, [one, Loop(1, 5, [one, one])]), one]
    assert budget.count_instructions(body, unrolled=True) == 35
    assert budget.count_instructions(body, unrolled=False) == 5


def test_the_least_instructions_of_a_product() -> None:
    """One matmul does 128 * 128 * 512 multiplications: 300 x 1100 x 700 are 231,000,000 of them,
    27.5 instructions, so no program has fewer than 27."""
    b = Builder()
    x, y = b.input((300, 1100)), b.input((1100, 700))
    graph = b.finish(b.dot(x, y, dtype=F32))
    budget.check_graph_instructions(graph, 27, 2)
    with pytest.raises(Exception, match="at least 27, the limit is 26"):
        budget.check_graph_instructions(graph, 26, 2)
    budget.check_graph_instructions(graph, 0, 1)


def test_limits_of_the_vendors_compiler() -> None:
    assert (budget.OPERATOR_LIMIT, budget.MATMUL_FLOPS) == (300_000, 16_777_216)
    budget.check_module_instructions(7, 7)
    with pytest.raises(Exception, match="NCC_EBVF030"):
        budget.check_module_instructions(8, 7)
