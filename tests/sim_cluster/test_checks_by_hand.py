"""Static checks of L0: the last tile and instruction that pass, and the first that do not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Space, Tile
from shardwright.sim_cluster.instructions.checks import check_bank, check_instruction, check_tiles

LIMITS = limits_for("trn1n.32xlarge")
F32, BF16 = DType.F32, DType.BF16
SBUF = Tile("s", Space.SBUF, 100, 1024, F32, address=0)
PSUM = Tile("p", Space.PSUM, 128, 512, F32, address=0)
VECTOR = Engine.VECTOR


def refused(code: str, text: str = "") -> AbstractContextManager[Any]:
    """A refusal with this code; none for no code."""
    return pytest.raises(SimulationError, match=f"{code}.*{text}") if code else nullcontext()


# SBUF of a partition has 196,608 bytes, PSUM 16,384; a slot here 4096 and 2048
TILES: list[tuple[Tile, dict[str, Any], str]] = [
    (SBUF, {"address": 196_608 - 4096}, ""),
    (SBUF, {"address": 196_608 - 4092}, "requires bytes 0..196608 .*got 192516..196612"),
    (SBUF, {"address": -4}, "requires bytes 0..196608"),
    (SBUF, {"slots": 48}, ""),
    (SBUF, {"slots": 49}, "requires bytes"),
    (SBUF, {"slots": 0}, "requires bytes"),
    (PSUM, {"slots": 8}, ""),
    (PSUM, {"slots": 9}, "requires bytes 0..16384"),
    (SBUF, {"partitions": 128}, ""),
    (SBUF, {"partitions": 129}, "requires 1..128 partitions, got 129"),
    (SBUF, {"partitions": 0}, "requires 1..128 partitions, got 0"),
    (SBUF, {"address": 6}, "requires an address divisible by 4, got 6"),
    (SBUF, {"address": 6, "dtype": BF16}, ""),
    (SBUF, {"space": Space.HBM}, "requires SBUF or PSUM"),
]


@pytest.mark.parametrize(("tile", "change", "text"), TILES)
def test_tiles(tile: Tile, change: dict[str, Any], text: str) -> None:
    with refused("SW_L0_TILE_SPACE" if text else "", text):
        check_tiles([SBUF, replace(tile, **change)], LIMITS)


def at(tile: int, rows: int = 32, start: int = 0, step: int = 1) -> AccessPattern:
    space = (Space.SBUF, Space.PSUM)[min(tile, 1)] if tile >= 0 else Space.SBUF
    return AccessPattern(space, tile, Affine(), ((step, rows), (1, 4)), start)


HBM = AccessPattern(Space.HBM, 0, Affine(), ((4, 32), (1, 4)))


def fill(dst: Any, **attrs: Any) -> Instr:
    return Instr("memset", VECTOR, dst, (), attrs or {"value": 0.0})


def load(dst: AccessPattern) -> Instr:
    return Instr("dma", Engine.DMA_IN, dst, (HBM,))


INSTRUCTIONS: list[tuple[Instr, str, str]] = [
    (fill(at(0)), "", ""),
    (Instr("wait", VECTOR, None), "", ""),
    (Instr("wait", VECTOR, at(0)), "SW_L0_OPERANDS", "wait has a destination"),
    (fill(None), "SW_L0_OPERANDS", "memset has no destination"),
    (Instr("fill", VECTOR, at(0)), "SW_L0_OPCODE", "no instruction is called fill"),
    (replace(fill(at(0)), engine=Engine.TENSOR), "SW_L0_ENGINE", "got tensor"),
    # attributes: none lacking, none that it does not have; those with a default may be missing
    (fill(at(0), value=0.0, more=1), "SW_L0_OPERANDS", r"takes the attributes \['value'\]"),
    (replace(fill(at(0)), attrs={}), "SW_L0_OPERANDS", r"got \[\]"),
    (Instr("tensor_scalar", VECTOR, at(0), (at(0),), {"op0": "add"}), "", ""),
    (Instr("tensor_scalar", VECTOR, at(0), (at(0),), {"op1": "add"}), "SW_L0_OPERANDS", "op0"),
    # tile 0 has 100 partitions
    (fill(at(2)), "SW_L0_OPERANDS", "the kernel has no tile 2"),
    (fill(replace(at(0), buffer=-1)), "SW_L0_OPERANDS", "the kernel has no tile -1"),
    (
        fill(replace(at(0), space=Space.PSUM)),
        "SW_L0_OPERANDS",
        "in psum does not fit tile s in sbuf",
    ),
    (fill(at(0, step=2)), "SW_L0_OPERANDS", "does not fit tile s"),
    (load(at(0, rows=32, start=68)), "", ""),
    (load(at(0, rows=32, start=69)), "SW_L0_BOUNDS", "69..101 lie outside tile s of 100"),
    (load(at(0, rows=32, start=-1)), "SW_L0_BOUNDS", "-1..31 lie outside"),
    (fill(at(0, rows=32, start=64)), "", ""),
    (fill(at(0, rows=32, start=48)), "SW_L0_PARTITION_START", "32 partitions cannot start at 48"),
    # what the tables refuse besides
    (Instr("tensor_copy", VECTOR, at(0), (HBM,)), "SW_L0_ILLEGAL", "vector cannot touch HBM"),
    (Instr("tensor_copy", VECTOR, at(0), (at(2),)), "SW_L0_OPERANDS", "no tile 2"),
]


@pytest.mark.parametrize(("instr", "code", "text"), INSTRUCTIONS)
def test_instructions(instr: Instr, code: str, text: str) -> None:
    with refused(code, text):
        check_instruction(instr, [SBUF, PSUM], LIMITS)


def test_the_second_destination_is_looked_at_too() -> None:
    attrs = {"func": "exp"}
    rows = replace(at(0), dims=((1, 32), (1, 1)))
    summed = Instr("activation_reduce", Engine.SCALAR, at(0), (at(0),), attrs, row_sum=rows)
    check_instruction(summed, [SBUF, PSUM], LIMITS)
    with refused("SW_L0_OPERANDS", "no tile 2"):
        check_instruction(replace(summed, row_sum=replace(rows, buffer=2)), [SBUF, PSUM], LIMITS)


@pytest.mark.parametrize(
    ("first", "end", "fits"),
    [
        (0, 2048, True),
        (0, 2049, False),
        (2044, 2048, True),
        (2044, 2052, False),
        (2048, 4096, True),
    ],
)
def test_a_result_of_tensor_lies_in_one_bank(first: int, end: int, fits: bool) -> None:
    with refused("" if fits else "SW_L0_PSUM_BANK", "cross a bank boundary"):
        check_bank(first, end, LIMITS)
