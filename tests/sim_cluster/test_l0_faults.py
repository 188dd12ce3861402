"""Every check of L0, each on a tiny kernel that commits exactly one fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from l0_cases import PSUM, hbm, instr, matmul_kernel, norm_kernel, tile

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Loop, Space, Tile
from tests.support import l0

F32, I32 = DType.F32, DType.I32
DIN, DOUT, VEC, SCA, TEN, GPS = (
    Engine.DMA_IN,
    Engine.DMA_OUT,
    Engine.VECTOR,
    Engine.SCALAR,
    Engine.TENSOR,
    Engine.GPSIMD,
)
ROW, ONE = (1, 8), (1, 1)


def kernel(tiles: list[Tile], *body: Instr | Loop, tokens: tuple[int, ...] = (0,) * 8) -> Kernel:
    return Kernel(KernelProgram("compute", "faulty"), tiles, list(body), tokens)


def sbuf(
    name: str = "t", elements: int = 8, address: int = 0, partitions: int = 128, **more: Any
) -> Tile:
    return Tile(name, Space.SBUF, partitions, elements, F32, address=address, **more)


def psum(elements: int = 512, address: int = 0) -> Tile:
    return Tile("p", Space.PSUM, 128, elements, F32, address=address)


def zeros(number: int, **more: Any) -> Instr:
    return instr("memset", VEC, tile(number, 128, ROW), value=0.0, **more)


def refuses(code: str, case: Kernel, *arrays: np.ndarray, match: str | None = None) -> None:
    data = arrays or (np.zeros(4096, np.float32), np.zeros(4096, np.float32))
    with pytest.raises(SimulationError, match=match) as caught:
        l0.run_kernel(case, list(data), {0: 0, 1: 0})
    assert caught.value.code == code, str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        sbuf(elements=49153),
        sbuf(elements=30000, slots=2),
        sbuf(address=196608 - 16),
        sbuf(partitions=129),
        sbuf(address=2),
        sbuf(address=-4),
        psum(elements=4097),
    ],
)
def test_a_tile_that_does_not_fit(bad: Tile) -> None:
    refuses("SW_L0_TILE_SPACE", kernel([bad]), match="kernel faulty")


def matmul_into(dst_offset: Affine, width: int, zero_when: tuple[int, ...] | None = ()) -> Kernel:
    a, b = sbuf("a", 128), sbuf("b", 512, address=4096)
    return kernel(
        [a, b, psum(1024)],
        instr("memset", VEC, tile(0, 128, (1, 128)), value=1.0),
        instr("memset", VEC, tile(1, 128, (1, 512)), value=1.0, signals=(0,)),
        instr(
            "matmul",
            TEN,
            tile(2, 128, (1, width), space=PSUM, offset=dst_offset),
            tile(0, 128, (1, 128)),
            tile(1, 128, (1, width)),
            waits=(0,),
            zero_when=zero_when,
        ),
    )


def test_a_result_across_two_psum_banks() -> None:
    refuses("SW_L0_ILLEGAL", matmul_into(Affine(256), 512), match="bank")


def test_a_result_that_crosses_a_bank_only_for_one_register_value() -> None:
    case = matmul_into(Affine(0, ((0, 512),)), 512)
    case.tiles[2] = psum(1024, address=0)
    l0.run_kernel(case, [], {0: 1})
    case.tiles[2] = Tile("p", Space.PSUM, 128, 1024, F32, address=1024)
    refuses("SW_L0_ILLEGAL", case, match="bank")


@pytest.mark.parametrize(("start", "count"), [(16, 16), (32, 64), (64, 65), (96, 33)])
def test_an_illegal_partition_start(start: int, count: int) -> None:
    case = kernel(
        [sbuf(partitions=128)], instr("memset", VEC, tile(0, count, ROW, start=start), value=0.0)
    )
    code = "SW_L0_BOUNDS" if start + count > 128 else "SW_L0_PARTITION_START"
    refuses(code, case)


def test_reading_what_nobody_wrote() -> None:
    case = kernel(
        [sbuf("a"), sbuf("b", address=64)],
        instr("tensor_copy", VEC, tile(1, 128, ROW), tile(0, 128, ROW)),
    )
    refuses("SW_L0_UNINITIALISED", case, match=r"instruction 0 \(tensor_copy on vector\).*tile a")


def test_reading_one_element_more_than_was_written() -> None:
    case = kernel(
        [sbuf("a"), sbuf("b", address=64)],
        instr("memset", VEC, tile(0, 128, (1, 7)), value=0.0),
        instr("tensor_copy", VEC, tile(1, 128, ROW), tile(0, 128, ROW)),
    )
    refuses("SW_L0_UNINITIALISED", case)


def test_strided_writes_count_only_what_they_touch() -> None:
    even = instr("memset", VEC, tile(0, 128, (2, 4)), value=0.0)
    odd = instr("memset", VEC, tile(0, 128, (2, 4), offset=Affine(1)), value=0.0)
    copy = instr("tensor_copy", VEC, tile(1, 128, ROW), tile(0, 128, ROW))
    tiles = [sbuf("a"), sbuf("b", address=64)]
    refuses("SW_L0_UNINITIALISED", kernel(tiles, even, copy))
    l0.run_kernel(kernel(tiles, even, odd, copy), [], {})


def test_a_rotating_slot_forgets_the_previous_iteration() -> None:
    load = instr("memset", VEC, tile(0, 128, ROW), value=0.0)
    copy = instr("tensor_copy", VEC, tile(1, 128, ROW), tile(0, 128, ROW))
    tiles = [sbuf("a", slots=2, loop=5), sbuf("b", address=64)]
    inner = Loop(6, 1, [load])
    l0.run_kernel(kernel(tiles, Loop(5, 4, [load, copy])), [], {})
    refuses("SW_L0_UNINITIALISED", kernel(tiles, Loop(5, 4, [copy, inner])))


def test_two_tiles_in_the_same_bytes() -> None:
    tiles = [sbuf("a"), sbuf("b", address=16), sbuf("c", address=128)]
    copy = instr("tensor_copy", VEC, tile(2, 128, ROW), tile(0, 128, ROW))
    l0.run_kernel(kernel(tiles, zeros(1), zeros(0), copy), [], {})
    refuses("SW_L0_UNINITIALISED", kernel(tiles, zeros(0), zeros(1), copy), match="tile a")


def test_adding_onto_psum_nobody_wrote() -> None:
    refuses("SW_L0_ACCUMULATE", matmul_into(Affine(), 512, None))


def test_adding_onto_psum_another_engine_wrote() -> None:
    case = matmul_into(Affine(), 512, None)
    case.body.insert(1, instr("memset", VEC, tile(2, 128, (1, 512), space=PSUM), value=0.0))
    refuses("SW_L0_ACCUMULATE", case, match="another engine")


def load(offset: Affine, rows: int = 128, row: int = 8) -> Instr:
    return instr("dma", DIN, tile(0, rows, ROW), hbm(0, offset, (row, rows), ROW))


@pytest.mark.parametrize("offset", [Affine(3073), Affine(-1), Affine(0, ((1, 3073),))])
def test_an_hbm_address_outside_the_tensor(offset: Affine) -> None:
    case = kernel([sbuf()], Loop(1, 2, [load(offset)]))
    refuses("SW_L0_BOUNDS", case, match="instruction 0 .*tensor 0 of 4096")


def test_a_tile_offset_outside_the_tile() -> None:
    write = instr("memset", VEC, tile(0, 128, (1, 4), offset=Affine(0, ((5, 4),))), value=0.0)
    refuses("SW_L0_BOUNDS", kernel([sbuf()], Loop(5, 3, [write])), match="tile t of 8")


def test_a_missing_token() -> None:
    refuses("SW_L0_DEADLOCK", kernel([sbuf()], zeros(0, waits=(3,))), match="semaphore 3")
    refuses("SW_L0_OPERANDS", kernel([sbuf()], zeros(0, waits=(30,))))


def test_one_token_serves_one_wait() -> None:
    case = kernel([sbuf()], zeros(0, waits=(0,)), zeros(0, waits=(0,)), tokens=(1,))
    refuses("SW_L0_DEADLOCK", case, match="instruction 1")


COPY_OUT = instr("dma", DOUT, hbm(1, Affine(), (8, 128), ROW), tile(0, 128, ROW))


def test_read_before_the_write_is_known_to_be_done() -> None:
    refuses(
        "SW_L0_RACE",
        kernel([sbuf()], zeros(0), COPY_OUT),
        match="written by instruction 1 of the vector",
    )


def test_write_before_the_read_is_known_to_be_done() -> None:
    body = [zeros(0, signals=(0,)), replace_waits(COPY_OUT, (0,)), zeros(0)]
    refuses("SW_L0_RACE", kernel([sbuf()], *body), match="read by instruction 1 of the dma_out")


def test_two_engines_write_without_order() -> None:
    case = kernel([sbuf()], zeros(0), instr("memset", GPS, tile(0, 128, ROW), value=1.0))
    refuses("SW_L0_RACE", case)


def test_two_engines_may_write_different_parts() -> None:
    left = instr("memset", VEC, tile(0, 128, (1, 4)), value=2.0, signals=(0,))
    right = instr("memset", GPS, tile(0, 128, (1, 4), offset=Affine(4)), value=3.0, signals=(1,))
    out = np.zeros(4096, np.float32)
    store = replace_waits(COPY_OUT, (0, 1))
    l0.run_kernel(kernel([sbuf()], left, right, store), [out, out], {})
    written = out[:1024].reshape(128, 8)
    assert (written[:, :4] == 2).all() and (written[:, 4:] == 3).all()


def summed(sums: AccessPattern | None, opcode: str = "activation_reduce", **more: Any) -> Instr:
    """Tile 1 = tile 0, and the sums of its rows."""
    attrs = {"func": "identity", "scale": 1.0, "bias": 0.0}
    made = instr(opcode, SCA, tile(1, 128, ROW), tile(0, 128, ROW), **more, **attrs)
    made.row_sum = sums
    return made


SUMS = [sbuf(), sbuf("u", address=64), sbuf("sums", 1, address=128)]
SUM_OUT = instr("dma", DOUT, hbm(1, Affine(), (1, 128), ONE), tile(2, 128, ONE))


def test_a_second_destination_is_written_in_order() -> None:
    begin, end = zeros(0, signals=(0,)), summed(tile(2, 128, ONE), waits=(0,), signals=(1,))
    refuses("SW_L0_RACE", kernel(SUMS, begin, end, SUM_OUT), match="written by .* of the scalar")
    out = np.ones(4096, np.float32)
    l0.run_kernel(kernel(SUMS, begin, end, replace_waits(SUM_OUT, (1,))), [out, out], {})
    assert (out[:128] == 0).all() and (out[128:] == 1).all()


def test_a_second_destination_waits_for_who_read_it() -> None:
    first = instr("memset", VEC, tile(2, 128, ONE), value=0.0, signals=(1,))
    store = replace_waits(SUM_OUT, (1,))
    body = [zeros(0, signals=(0,)), first, store, summed(tile(2, 128, ONE), waits=(0,))]
    refuses("SW_L0_RACE", kernel(SUMS, *body))


@pytest.mark.parametrize(
    "bad",
    [
        summed(None),
        summed(tile(2, 64, ONE)),
        summed(tile(1, 128, ROW)),
        summed(tile(2, 128, ONE), "activation"),
        summed(tile(0, 128, (0, 1), offset=Affine(9))),
    ],
)
def test_a_second_destination_has_one_number_for_each_row(bad: Instr) -> None:
    refuses("SW_L0_ILLEGAL", kernel(SUMS, zeros(0), bad))


def test_order_passes_through_a_third_engine() -> None:
    relay = instr(
        "tensor_copy", SCA, tile(1, 128, ROW), tile(0, 128, ROW), waits=(0,), signals=(1,)
    )
    body = [zeros(0, signals=(0,)), relay, replace_waits(COPY_OUT, (1,))]
    out = np.ones(4096, np.float32)
    l0.run_kernel(kernel([sbuf(), sbuf("b", address=64)], *body), [out, out], {})
    assert not out[:1024].any() and out[1024:].all()


def replace_waits(given: Instr, waits: tuple[int, ...]) -> Instr:
    return replace(given, waits=waits)


def test_hbm_read_while_it_is_written() -> None:
    store = instr("dma", DOUT, hbm(1, Affine(64), (8, 128), ROW), tile(0, 128, ROW), waits=(0,))
    again = instr("dma", DIN, tile(1, 128, ROW), hbm(1, Affine(), (8, 128), ROW))
    beside = instr("dma", DIN, tile(1, 128, ROW), hbm(1, Affine(2048), (8, 128), ROW))
    tiles = [sbuf(), sbuf("b", address=64)]
    refuses("SW_L0_RACE", kernel(tiles, zeros(0, signals=(0,)), store, again), match="tensor 1")
    l0.run_kernel(
        kernel(tiles, zeros(0, signals=(0,)), store, beside), [np.zeros(4096, np.float32)] * 2, {}
    )


def test_hbm_panels_that_interleave_are_no_race() -> None:
    store = instr("dma", DOUT, hbm(1, Affine(8), (16, 128), ROW), tile(0, 128, ROW), waits=(0,))
    other = instr("dma", DIN, tile(1, 128, ROW), hbm(1, Affine(), (16, 128), ROW))
    one_over = instr("dma", DIN, tile(1, 128, ROW), hbm(1, Affine(1), (16, 128), ROW))
    tiles = [sbuf(), sbuf("b", address=64)]
    l0.run_kernel(
        kernel(tiles, zeros(0, signals=(0,)), store, other), [np.zeros(4096, np.float32)] * 2, {}
    )
    refuses("SW_L0_RACE", kernel(tiles, zeros(0, signals=(0,)), store, one_over))


@pytest.mark.parametrize("remove", [0, 1, 2, 3, 4, 5])
def test_every_semaphore_of_the_norm_matters(remove: int) -> None:
    """Taking away one semaphore leaves an unordered access (6 is implied: w and x come through one
    queue).
    """
    case = norm_kernel(512, 32)

    def strip(items: list[Instr | Loop]) -> list[Instr | Loop]:
        return [
            Loop(i.register, i.trip, strip(i.body))
            if isinstance(i, Loop)
            else replace(i, waits=tuple(w for w in i.waits if w != remove))
            for i in items
        ]

    case.body = strip(case.body)
    arrays = [np.ones(512 * 32, np.float32), np.ones(32, np.float32), np.ones(512 * 32, np.float32)]
    refuses("SW_L0_RACE", case, *arrays)


def test_two_slots_and_an_odd_trip_count_collide_at_the_loop_border() -> None:
    """Three panels on two slots: the next sum starts on the slot the last one still uses."""
    k, m, n = 384, 128, 1024
    arrays = [np.ones(k * m, np.float32), np.ones(k * n, np.float32), np.ones(m * n, np.float32)]
    refuses("SW_L0_RACE", matmul_kernel(m, n, k), *arrays, match="tile a")


def scatter(values: Callable[[np.ndarray], np.ndarray]) -> None:
    tiles = [sbuf("rows", partitions=4), Tile("index", Space.SBUF, 4, 1, I32, address=64)]
    case = kernel(
        tiles,
        instr("dma", DIN, tile(0, 4, ROW), hbm(0, Affine(), (8, 4), ROW)),
        instr("dma", DIN, tile(1, 4, ONE), hbm(1, Affine(), (1, 4), ONE), signals=(0,)),
        instr(
            "dma_scatter",
            DOUT,
            hbm(2, Affine(), (8, 4), ROW),
            tile(0, 4, ROW),
            tile(1, 4, ONE),
            waits=(0,),
            row_stride=8,
            rows=5,
        ),
    )
    rows = values(np.arange(32, dtype=np.float32).reshape(4, 8))
    out = np.zeros(40, np.float32)
    l0.run_kernel(case, [rows.reshape(-1), np.array([3, 1, 3, 9], np.int32), out], {})
    want = np.zeros((5, 8), np.float32)
    want[[3, 1]] = rows[[0, 1]]
    np.testing.assert_array_equal(out.reshape(5, 8), want)


def test_scatter_of_equal_rows_must_carry_equal_values() -> None:
    scatter(lambda rows: np.where(np.arange(4)[:, None] == 2, rows[0], rows))
    with pytest.raises(SimulationError, match="row 3 twice") as caught:
        scatter(lambda rows: rows)
    assert caught.value.code == "SW_L0_SCATTER_CONFLICT"


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (instr("memset", SCA, tile(0, 128, ROW), value=0.0), "SW_L0_ENGINE"),
        (instr("frobnicate", VEC, tile(0, 128, ROW)), "SW_L0_OPCODE"),
        (instr("memset", VEC, None, value=0.0), "SW_L0_OPERANDS"),
        (instr("memset", VEC, tile(7, 128, ROW), value=0.0), "SW_L0_OPERANDS"),
        (instr("memset", VEC, tile(0, 128, (0, 8)), value=0.0), "SW_L0_ILLEGAL"),
        (instr("memset", GPS, tile(1, 128, ROW, space=PSUM), value=0.0), "SW_L0_ILLEGAL"),
        (instr("memset", VEC, tile(1, 128, ROW), value=0.0), "SW_L0_OPERANDS"),
        (instr("tensor_copy", VEC, tile(0, 128, ROW), tile(0, 128, (1, 4))), "SW_L0_SHAPE"),
        (
            instr("tensor_tensor", VEC, tile(0, 128, ROW), tile(0, 128, ROW), op="add"),
            "SW_L0_ILLEGAL",
        ),
    ],
)
def test_instructions_no_engine_accepts(bad: Instr, code: str) -> None:
    refuses(code, kernel([sbuf(), psum()], bad))
