"""Unrolled, reordered loops: order over memory is kept, values stay, engines wait less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.compiler.codegen.builder import Builder, Held, Scope
from shardwright.compiler.codegen.overlap import schedule
from shardwright.compiler.codegen.search import EFFORTS, ROW_EFFORTS, Effort
from shardwright.compiler.isa.kernel import Affine, KernelProgram
from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Space, Tile
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.schedule.engine_order import Memory
from shardwright.compiler.timing.evaluate import ORACLE_DMA, Shares, kernel_times
from tests.compiler.codegen.kernel_harness import BF16, F32, TARGET, check, count
from tests.compiler.codegen.row_cases import backward
from tests.compiler.codegen.test_contractions import matmul
from tests.compiler.codegen.test_indexed import scatter
from tests.compiler.codegen.test_loop_fusion import rms_norm, rms_norm_backward, softmax
from tests.support.kernel_checks import kernel_time

CASES = {
    "softmax": lambda: softmax(1024, 4100, over=1),
    "softmax of columns": lambda: softmax(500, 9000, over=0),
    "norm": lambda: rms_norm(1024, 4100, BF16),
    "norm backward": lambda: rms_norm_backward(1024, 2000),
    "matmul": lambda: matmul(1024, 1024, 1040, transposed=(0, 1, 0)),
    "scatter": lambda: scatter(512, 13, 67),
}


def only(monkeypatch: pytest.MonkeyPatch, unroll: int) -> None:
    """Make the default level unroll by `unroll`, whatever the time."""
    monkeypatch.setitem(EFFORTS, 2, Effort(1, 1.0, ((unroll,),)))


@pytest.mark.parametrize("unroll", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_values_stay_and_nothing_races(
    name: str, unroll: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, unroll)
    check(CASES[name](), 1e-2 if name == "norm" else 1e-6)


def test_most_cases_are_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prime trip count stays as it is."""
    sizes = []
    for unroll in (1, 2):
        only(monkeypatch, unroll)
        sizes.append([count(make().kernel()) for make in CASES.values()])
    grown = [after > before for before, after in zip(*sizes, strict=True)]
    assert sum(grown) >= len(CASES) - 2


def test_a_norm_waits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalar stands between two steps of Vector: alone they take turns."""
    times = []
    for unroll in (1, 4):
        only(monkeypatch, unroll)
        m = rms_norm(2048, 4096)
        times.append(kernel_time(m.kernel(), m.tensors, load_target(TARGET)).duration_ps)
    assert times[1] < 0.95 * times[0]


def unary(tile: int, source: int, engine: Engine = Engine.VECTOR) -> Instr:
    def on_chip(number: int) -> AccessPattern:
        return AccessPattern(Space.SBUF, number, Affine(), ((1, 128), (1, 64)))

    return Instr("tensor_copy", engine, on_chip(tile), (on_chip(source),))


def ordered(instrs: list[Instr], costs: dict[Engine, int]) -> list[int]:
    """Positions of `instrs` in a list schedule where an instruction takes what its engine says."""
    tiles = [Tile(f"t{n}", Space.SBUF, 128, 64, F32) for n in range(8)]
    kernel = Kernel(KernelProgram("compute", "order"), tiles)
    made = schedule(instrs, Memory(kernel, ()), [(costs[i.engine], 0) for i in instrs])
    return [instrs.index(i) for i in made]


def test_a_queue_does_not_wait_while_it_could_work() -> None:
    scalar = Engine.SCALAR
    chains = [unary(1, 0), unary(2, 1, scalar), unary(3, 2), unary(5, 4), unary(6, 5, scalar)]
    assert ordered(chains, {Engine.VECTOR: 10, scalar: 10}) == [0, 1, 3, 2, 4]


def test_writes_and_reads_of_a_tile_keep_their_order() -> None:
    scalar = Engine.SCALAR
    reused = [unary(1, 0), unary(2, 1, scalar), unary(1, 3), unary(4, 1, scalar)]
    assert ordered(reused, {Engine.VECTOR: 1, scalar: 50}) == [0, 1, 2, 3]


def test_loads_of_the_next_rows_wait_for_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that take over the tiles of loads are read before those load again."""
    times = []
    for loads_apart in (False, True):
        monkeypatch.setitem(ROW_EFFORTS, 2, replace(ROW_EFFORTS[2], loads_apart=loads_apart))
        m = backward((2, 2048, 2048, 64, 64), BF16)
        times.append(kernel_time(m.kernel(), m.tensors, load_target(TARGET)).duration_ps)
    assert times[1] < 0.95 * times[0]


def test_what_moves_more_than_it_computes_takes_as_long_as_its_transfers() -> None:
    """With the share of the queues for which code is chosen."""
    m, shares = backward((2, 1024, 1024, 64, 64), BF16), (Shares(ORACLE_DMA),)
    (time,) = kernel_times(m.kernel(), m.tensors, load_target(TARGET), shares)
    assert time.duration_ps <= 1.01 * (time.busy_ps["dma_in"] + time.busy_ps["dma_out"])
    check(m, 1e-2)


def test_released_tiles_are_taken_in_turn() -> None:
    """The one that was released longest ago is the one least likely to be waited for."""
    scope = Scope(builder := Builder(limits_for(TARGET), (), 0), builder.body, {}, -1)
    tiles = [scope.tile("t", 128, 64, F32) for _ in range(3)]
    for tile in tiles:
        scope.release(tile)
    assert [scope.tile("u", 128, 64, F32) for _ in range(4)] == [*tiles, Held(len(tiles), {})]
