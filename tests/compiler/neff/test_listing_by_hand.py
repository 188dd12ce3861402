"""Every line of a listing, and how each marks what it has besides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Node, Tensor
from shardwright.compiler.isa.program import (
    AccessPattern,
    Border,
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
    Space,
    Tile,
)
from shardwright.compiler.neff.listing import function_lines, program_lines

F32, BF16 = DType.F32, DType.BF16
ROWS = AccessPattern(Space.HBM, 1, Affine(8, ((0, 4),)), ((64, 2), (1, 3)))
HELD = AccessPattern(Space.SBUF, 0, Affine(), ((1, 2), (1, 3)), start=32)
SUMS = AccessPattern(Space.PSUM, 1, Affine(), ((1, 2), (1, 1)))
LOAD = Instr("dma", Engine.DMA_IN, HELD, (ROWS,), borders=(0,), signals=(0, 1))
ACT = Instr(
    "activation_reduce",
    Engine.SCALAR,
    HELD,
    (HELD,),
    {"func": "exp", "bias": 1.5},
    waits=(0,),
    row_sum=SUMS,
)
WAIT = Instr("wait", Engine.DMA_OUT, None, waits=(1,))
TILES = [
    Tile("t", Space.SBUF, 2, 3, F32, slots=2, loop=0, address=64),
    Tile("s", Space.PSUM, 2, 1, BF16, address=0),
]
FIRST = Kernel(
    KernelProgram("compute", "exp", (2, 3), (Node("iota", (), (0,), F32, {}),), loc=1),
    TILES,
    [Loop(0, 4, [LOAD, Loop(1, 5, [ACT])]), WAIT],
    tokens=(0, 2),
)
SECOND = Kernel(
    KernelProgram("compute", "rest", loc=2),
    [],
    [],
    borders=(Border(Engine.DMA_OUT, 1),),
    after=3,
)
GATHER = CollectiveCall("all_gather", ("dp", "tp"), F32, (1, 4, 5))
PARTS = replace(GATHER, parts=((1, 2, 3), (1, 6, 1)))
FUNCTION = Function(
    "layer",
    [
        Tensor("x", (2, 3), F32, "input"),
        Tensor("tmp", (6,), BF16, "scratch", offset_bytes=128),
        Tensor("y", (2, 3), F32, "output", alias=0),
    ],
    (0,),
    (2,),
    (),
    2,
    [FIRST, SECOND],
    [GATHER, PARTS],
    scratch_bytes=512,
)
PROGRAM = Program(
    "forward",
    "trn1n.32xlarge",
    [FUNCTION],
    [
        ProgramBuffer("w", (4, 2), F32, "named"),
        ProgramBuffer("", (3,), BF16, "arena", offset_bytes=256),
    ],
    ("w",),
    (),
    (
        Call(0, (0, 1), (1,), scratch=512),
        Repeat(7, 3, (Call(0, (1,), (0, 1), (Affine(2, ((7, 1),)),)),)),
    ),
    4096,
    locations=(("model.py", 3, ""), ("layer.py", 9, "scan")),
)


def listed(function: Function = FUNCTION, engines: Collection[Engine] = ()) -> list[str]:
    return list(function_lines(function, PROGRAM.locations, engines))


def test_a_program() -> None:
    assert list(program_lines(PROGRAM)) == [
        "program forward for trn1n.32xlarge",
        "arena 4096 bytes, scratch zones up to 512 bytes",
        "buffer 0 w f32[4,2]",
        "buffer 1 arena+256 bf16[3]",
        "call layer (0, 1) -> (1) scratch+512",
        "repeat p7 3 times",
        "  call layer 2+1*p7 (1) -> (0, 1) scratch+0",
    ]


HEAD = [
    "function layer (2 kernels)",
    "  tensor 0 input x f32[2,3]",
    "  tensor 1 scratch tmp bf16[6] @scratch+128",
    "  tensor 2 output y f32[2,3] aliases tensor 0",
    "  collective 0 all_gather over dp,tp 1x4x5",
    "  collective 1 all_gather over dp,tp 1x2x3 1x6x1",
]
LOADED = (
    "dma_in  dma sbuf0+0[2 3 from partition 32] <- hbm1+8+4*r0[2:64 3] border:0 signal:0 signal:1"
)
ACTED = (
    "scalar  activation_reduce sbuf0+0[2 3 from partition 32] psum1+0[2 1] <-"
    " sbuf0+0[2 3 from partition 32] bias=1.5 func=exp wait:0"
)


def test_a_function_with_its_meaning_and_its_code() -> None:
    assert listed() == [
        *HEAD,
        "  kernel 0 compute exp from layer.py:9",
        "    iter_dims [2, 3]",
        "    %0 = iota() : f32 over [0]",
        "    tile 0 sbuf t 2 x 3 f32 @64 x 2 slots by r0",
        "    tile 1 psum s 2 x 1 bf16 @0",
        "    semaphores 0 2",
        "    loop r0 4 times",
        f"      {LOADED}",
        "      loop r1 5 times",
        f"        {ACTED}",
        "    dma_out wait wait:1",
        "  kernel 1 compute rest after 3 of the other core without a barrier",
        "    border 0 dma_out behind kernel 0",
    ]


def test_the_code_of_some_engines_inside_the_loops_they_share() -> None:
    kernels = [
        "  kernel 0 compute exp from layer.py:9",
        "  kernel 1 compute rest after 3 of the other core without a barrier",
    ]
    assert listed(engines=(Engine.SCALAR,)) == [
        *HEAD,
        kernels[0],
        "    loop r0 4 times",
        "      loop r1 5 times",
        f"        {ACTED}",
        kernels[1],
    ]
    assert listed(engines=(Engine.DMA_OUT, Engine.DMA_IN)) == [
        *HEAD,
        kernels[0],
        "    loop r0 4 times",
        f"      {LOADED}",
        "    dma_out wait wait:1",
        kernels[1],
    ]


def test_two_physical_cores_and_places_that_are_unknown() -> None:
    other = replace(SECOND, borders=None, after=0)
    lowest = replace(other, program=replace(other.program, loc=-1))
    found = listed(replace(FUNCTION, kernels=[other], partner=[lowest], collectives=[]))
    assert found[4:] == [
        "  subgraph sg00 on physical core 0",
        "  kernel 0 compute rest",
        "  subgraph sg01 on physical core 1",
        "  kernel 0 compute rest",
    ]
    first = replace(other, program=replace(other.program, loc=0))
    assert "  kernel 0 compute rest from model.py:3" in listed(replace(FUNCTION, kernels=[first]))
