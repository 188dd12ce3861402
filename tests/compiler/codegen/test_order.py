"""Engine order and addresses: tokens that are needed are there, removing any one is caught, tiles
do not collide.
"""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.compiler.diagnostics import CapacityError, SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor
from shardwright.compiler.isa.limits import (
    check_instr,
    check_kernel,
    limits_for,
    start_is_legal,
    walk,
)
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Loop, Space, Tile
from shardwright.compiler.schedule.allocate import allocate, lifetimes
from shardwright.compiler.schedule.engine_order import order_engines
from tests.compiler.codegen.kernel_harness import F32, Maker, arrays, check
from tests.compiler.codegen.test_contractions import matmul
from tests.compiler.codegen.test_indexed import scatter
from tests.compiler.codegen.test_loop_fusion import rms_norm_backward, softmax
from tests.support import l0
from tests.support.kernel_checks import overlaps

LIMITS = limits_for("trn1n.32xlarge")


def chip(tile: int, partitions: int = 128, elements: int = 64, start: int = 0) -> AccessPattern:
    return AccessPattern(Space.SBUF, tile, Affine(), ((1, partitions), (1, elements)), start)


START = Affine()


def hbm(tensor: int, offset: Affine = START) -> AccessPattern:
    return AccessPattern(Space.HBM, tensor, offset, ((64, 128), (1, 64)))


def kernel(tiles: list[Tile], body: list[Instr | Loop]) -> Kernel:
    return Kernel(KernelProgram("compute", "case"), tiles, body)


def sbuf(name: str, elements: int = 64, slots: int = 1, loop: int = -1) -> Tile:
    return Tile(name, Space.SBUF, 128, elements, DType.F32, slots, loop)


def pipeline(trip: int, slots: int) -> Kernel:
    """load -> double -> store over row blocks, twice over (a loop around it)."""
    offset = Affine(0, ((0, 64 * 128 * trip), (1, 64 * 128)))
    body: list[Instr | Loop] = [
        Instr("dma", Engine.DMA_IN, chip(0), (hbm(0, offset),)),
        Instr("tensor_tensor", Engine.VECTOR, chip(1), (chip(0), chip(0)), {"op": "add"}),
        Instr("dma", Engine.DMA_OUT, hbm(1, offset), (chip(1),)),
    ]
    made = kernel(
        [sbuf("in", slots=slots, loop=1), sbuf("out", slots=slots, loop=1)],
        [Loop(0, 2, [Loop(1, trip, body)])],
    )
    tensors = [
        Tensor(n, (2 * trip * 128, 64), F32, k) for n, k in (("x", "input"), ("y", "output"))
    ]
    allocate(made, LIMITS)
    order_engines(made, tensors, LIMITS)
    return made


@pytest.mark.parametrize(("trip", "slots"), [(1, 1), (3, 1), (4, 2), (3, 2), (5, 2), (5, 3)])
def test_rotating_tiles_are_safe_even_when_slots_do_not_come_round(trip: int, slots: int) -> None:
    made = pipeline(trip, slots)
    tensors = [
        Tensor(n, (2 * trip * 128, 64), F32, k) for n, k in (("x", "input"), ("y", "output"))
    ]
    data = arrays(tensors, 0)
    l0.run_kernel(made, data, {})
    assert (data[1] == 2 * data[0]).all()


def test_a_pipeline_needs_two_tokens_forward_and_two_back() -> None:
    assert sorted(pipeline(4, 2).tokens) == [0, 0, 2, 2]


CASES = {
    "softmax": lambda: softmax(300, 131, over=0),
    "backward": lambda: rms_norm_backward(300, 200),
    "matmul": lambda: matmul(200, 131, 520, transposed=(0, 1, 0)),
    "scatter": lambda: scatter(300, 13, 67),
}


@pytest.mark.parametrize("name", CASES)
def test_no_token_is_superfluous(name: str) -> None:
    """Without any one semaphore the code races (or reads stale data): the reduction of edges keeps
    only needed ones.
    """
    m = CASES[name]()
    full = m.kernel()
    missed = []
    for semaphore in range(len(full.tokens)):
        damaged = m.kernel()
        for instr in walk(damaged.body):
            instr.waits = tuple(s for s in instr.waits if s != semaphore)
        try:
            l0.run_kernel(damaged, arrays(m.tensors, 0), {})
            missed.append(semaphore)
        except SimulationError:
            pass
    # A token whose loops run too few times to reuse a slot is needed only for longer loops.
    idle = [s for s in missed if full.tokens[s] == 0]
    assert len(idle) <= len(full.tokens) // 4, (idle, full.tokens)


def test_too_many_semaphores_is_an_error() -> None:
    m = rms_norm_backward(300, 200)
    with pytest.raises(CapacityError, match="SW_SEMAPHORES"):
        m.kernel(dataclasses.replace(LIMITS, semaphores=3))


# addresses


def two_phases(elements: int) -> Kernel:
    """Two loops one after the other, each with a large rotating tile."""

    def phase(tile: int, register: int) -> Loop:
        load = Instr("dma", Engine.DMA_IN, chip(tile, elements=elements), (hbm(0),))
        return Loop(register, 4, [load])

    tiles = [sbuf(f"t{n}", elements, 2, n) for n in range(2)]
    return kernel(tiles, [phase(0, 0), phase(1, 1)])


def test_tiles_of_different_phases_share_memory_only_when_they_must() -> None:
    small, large = two_phases(1000), two_phases(20000)
    for made in (small, large):
        allocate(made, LIMITS)
        assert not overlaps(made)
    assert small.tiles[0].address != small.tiles[1].address
    assert large.tiles[0].address == large.tiles[1].address
    assert [life.home for life in lifetimes(large)] == [(0,), (1,)]


def test_capacity_error_names_kernel_tile_and_limit() -> None:
    made = two_phases(30000)
    with pytest.raises(
        CapacityError, match=r"kernel case, tile t0: requires 240000 bytes of SBUF.*196608"
    ) as error:
        allocate(made, LIMITS)
    assert error.value.code == "SW_SBUF_CAPACITY"


def test_overlap_check_sees_a_bad_address() -> None:
    made = rms_norm_backward(300, 200).kernel()
    for tile in made.tiles:
        tile.address = 0
    assert overlaps(made)


def test_shared_memory_is_ordered() -> None:
    """With a fifth of SBUF the phases of a wide softmax share bytes; L0 sees no race and the same
    values.
    """
    m = softmax(67, 9001)
    m.name = "tight"
    small = dataclasses.replace(LIMITS, sbuf_bytes=40 * 1024)
    made = m.kernel(small)
    assert max(t.address + t.slots * t.slot_bytes for t in made.tiles) <= small.sbuf_bytes
    tight, roomy = arrays(m.tensors, 0), arrays(m.tensors, 0)
    l0.run_kernel(made, tight, {})
    l0.run_kernel(m.kernel(), roomy, {})
    assert abs(tight[-1] - roomy[-1]).max() < 1e-6
    check(m)


# limits


@pytest.mark.parametrize(
    ("count", "start", "legal"),
    [
        (32, 96, True),
        (32, 16, False),
        (64, 64, True),
        (64, 32, False),
        (65, 0, True),
        (65, 64, False),
        (1, 1, False),
    ],
)
def test_partition_start_rule(count: int, start: int, legal: bool) -> None:
    assert start_is_legal(start, count) is legal


def psum(offset: int = 0, elements: int = 512, m: int = 128) -> AccessPattern:
    return AccessPattern(Space.PSUM, 2, Affine(offset), ((1, m), (1, elements)))


TILES = [sbuf("a", 4096), sbuf("b", 4096), Tile("p", Space.PSUM, 128, 1024, DType.F32)]
ILLEGAL = {
    "moving": (
        Instr("matmul", Engine.TENSOR, psum(), (chip(0, elements=128), chip(1, elements=600))),
        "N up to",
    ),
    "stationary": (
        Instr("matmul", Engine.TENSOR, psum(), (chip(0, elements=129), chip(1, elements=512))),
        "got 128, 129",
    ),
    "bank": (
        Instr("matmul", Engine.TENSOR, psum(256), (chip(0, elements=128), chip(1, elements=512))),
        "PSUM bank",
    ),
    "engine": (
        Instr("activation", Engine.VECTOR, chip(0), (chip(1),)),
        "cannot be issued by vector",
    ),
    "gpsimd psum": (
        Instr("tensor_copy", Engine.GPSIMD, chip(0, elements=512), (psum(),)),
        "cannot touch PSUM",
    ),
    "start": (
        Instr("tensor_copy", Engine.VECTOR, chip(0, 32), (chip(1, 32, start=16),)),
        "cannot start at 16",
    ),
    "bounds": (
        Instr("tensor_copy", Engine.VECTOR, chip(0, elements=5000), (chip(1, elements=5000),)),
        "leaves tile",
    ),
    "hbm": (Instr("tensor_copy", Engine.VECTOR, chip(0), (hbm(0),)), "cannot touch HBM"),
    "sources": (Instr("select", Engine.VECTOR, chip(0), (chip(1),)), "sources"),
    "opcode": (Instr("no_such", Engine.VECTOR, chip(0), ()), "unknown instruction"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_limits_refuse(name: str) -> None:
    instr, text = ILLEGAL[name]
    for tile in TILES:
        tile.address = 0
    findings = check_instr(instr, TILES, LIMITS)
    assert findings and any(text in f for f in findings), findings


def test_limits_of_a_machine_are_taken_as_they_are() -> None:
    assert limits_for("trn2.48xlarge").sbuf_bytes > LIMITS.sbuf_bytes == 196608
    assert limits_for(LIMITS) is LIMITS


def test_kernel_check_collects_all_findings() -> None:
    made = Maker((67,), "ok")
    made.store(made.node("negate", made.load((0,))), (0,))
    good = made.kernel()
    assert check_kernel(good, LIMITS) == []
    good.tiles[0].address = 10**6
    good.tiles[1].partitions = 500
    assert len(check_kernel(good, LIMITS)) >= 2
