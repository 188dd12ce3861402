"""What engines accept, the last legal figure of each rule and the first beyond it.

Sources: K1, K2 and K3 are the architecture pages of the kernel interface (128 partitions, 192, 224
and 256 KiB of SBUF each, 8 banks of 2 KiB of PSUM, access patterns of four dims with 16-bit sizes
and strides); ISA the pages of matmul and transpose (128 x 128 stationary, 512 moving).
"""

from __future__ import annotations

import re
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram
from shardwright.compiler.isa.limits import check_instr, check_kernel, limits_for, walk
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Loop, Space, Tile
from tests.support.machines import machine_file

F32, BF16, I32 = DType.F32, DType.BF16, DType.I32
LIMITS = limits_for("trn1n.32xlarge")
VECTOR, GPSIMD, TENSOR = Engine.VECTOR, Engine.GPSIMD, Engine.TENSOR
KIB = 1024


@pytest.mark.parametrize(
    ("name", "generation", "sbuf_kib", "semaphores"),
    [
        ("inf1.xlarge", "NeuronCore-v1", 64, 32),
        ("trn1.2xlarge", "NeuronCore-v2", 192, 256),
        ("inf2.xlarge", "NeuronCore-v2", 192, 256),
        ("trn1n.32xlarge", "NeuronCore-v2", 192, 256),
        ("trn2.48xlarge", "NeuronCore-v3", 224, 256),
        ("trn2-ultraserver", "NeuronCore-v3", 224, 256),
        ("trn3-gen1-ultraserver", "NeuronCore-v4", 256, 256),
    ],
)
def test_the_limits_of_a_machine(
    name: str, generation: str, sbuf_kib: int, semaphores: int
) -> None:
    found = limits_for(name)
    assert found.psum_banks == 8
    # partitions, K, stationary, moving, transpose, PSUM and its banks
    matrix = (128, 128, 128, 512, 128, 16 * KIB, 2048)
    # free dims, size and stride of a dim, elements per partition in SBUF and PSUM
    access = (4, 65_535, 32_767, 65_536, 4_096)
    # GpSimd came with NeuronCore-v2 (F1)
    engines = ("tensor", "vector", "scalar", "gpsimd")[: 3 if generation == "NeuronCore-v1" else 4]
    row = (generation, *matrix, sbuf_kib * KIB, *access, semaphores, engines)
    assert astuple(found) == row


def test_names_without_limits() -> None:
    with pytest.raises(UsageError, match=r"target requires one of inf1.*, got 'trn1n'"):
        limits_for("trn1n")


def test_a_machine_of_a_file_has_limits_of_its_own(tmp_path: Path) -> None:
    name = machine_file(tmp_path, sbuf_bytes_per_partition=96 * KIB, semaphores=64)
    assert limits_for(name) == replace(LIMITS, sbuf_bytes=96 * KIB, semaphores=64)


# Tiles: SBUF 0, PSUM 1, bf16 in SBUF 2, int32 in SBUF 3, PSUM in bf16 4


def tiles() -> list[Tile]:
    return [
        Tile("s", Space.SBUF, 128, 49_152, F32, address=0),
        Tile("p", Space.PSUM, 128, 4_096, F32, address=0),
        Tile("b", Space.SBUF, 128, 49_152, BF16, address=0),
        Tile("i", Space.SBUF, 128, 49_152, I32, address=0),
        Tile("h", Space.PSUM, 128, 4_096, BF16, address=0),
    ]


def at(tile: int, *free: tuple[int, int], rows: int = 128, start: int = 0, offset: Any = 0) -> Any:
    space = Space.PSUM if tile in (1, 4) else Space.SBUF
    place = offset if isinstance(offset, Affine) else Affine(offset)
    return AccessPattern(space, tile, place, ((1, rows), *free), start)


def copy(dst: Any, src: Any, engine: Engine = VECTOR) -> Instr:
    return Instr("tensor_copy", engine, dst, (src,))


def findings(instr: Instr, own: list[Tile] | None = None) -> list[str]:
    return check_instr(instr, own or tiles(), LIMITS)


ONE = (1, 1)
HBM = AccessPattern(Space.HBM, 0, Affine(), ((1, 128), ONE))
# (what is legal, what is not, what is said of it)
EDGES: dict[str, tuple[Instr, Instr, str]] = {
    "dims": (
        copy(at(0, ONE, ONE, ONE, ONE), at(0, ONE)),
        copy(at(0, ONE, ONE, ONE, ONE, ONE), at(0, ONE)),
        "at most 4 free dims, got 5",
    ),
    "sizes": (
        copy(at(0, (1, 1)), at(0, ONE)),
        copy(at(0, (1, 0), offset=1), at(0, ONE)),
        "positive sizes",
    ),
    "stride 0 of one element": (
        copy(at(0, (0, 1)), at(0, (0, 7))),
        copy(at(0, (0, 2)), at(0, (0, 7))),
        "strides other than 0",
    ),
    "rows of 128 partitions": (
        Instr("dma", Engine.DMA_IN, at(0, ONE, rows=64, start=64), (HBM,)),
        Instr("dma", Engine.DMA_IN, at(0, ONE, rows=64, start=65), (HBM,)),
        "has 128 partitions, got 65\\+64",
    ),
    "start of 32": (
        copy(at(0, ONE, rows=32, start=96), at(0, ONE)),
        copy(at(0, ONE, rows=32, start=95), at(0, ONE)),
        "32 partitions cannot start at 95",
    ),
    "start of 33": (
        copy(at(0, ONE, rows=33, start=64), at(0, ONE)),
        copy(at(0, ONE, rows=33, start=32), at(0, ONE)),
        "33 partitions cannot start at 32",
    ),
    "start of 65": (
        copy(at(0, ONE, rows=65), at(0, ONE)),
        copy(at(0, ONE, rows=63, start=32), at(0, ONE)),
        "63 partitions cannot start at 32",
    ),
    "end of a tile": (
        copy(at(0, (1, 100), offset=49_052), at(0, ONE)),
        copy(at(0, (1, 100), offset=49_053), at(0, ONE)),
        "leaves tile s of 49152 elements",
    ),
    "end of a tile, two dims": (
        copy(at(0, (100, 3), (2, 5), offset=49_152 - 209), at(0, ONE)),
        copy(at(0, (100, 3), (2, 5), offset=49_152 - 208), at(0, ONE)),
        "leaves tile s",
    ),
    "end of a tile, backwards": (
        copy(at(0, ONE), at(0, (-3, 5), offset=49_151)),
        copy(at(0, ONE), at(0, (-3, 5), offset=49_152)),
        "leaves tile s",
    ),
    "begin of a tile": (
        copy(at(0, ONE), at(0, (-3, 5), offset=12)),
        copy(at(0, ONE), at(0, (-3, 5), offset=11)),
        "leaves tile s",
    ),
    "a place that registers say": (
        copy(at(0, ONE, offset=Affine(10**6, ((0, 1),))), at(0, ONE)),
        copy(at(0, ONE, offset=10**6), at(0, ONE)),
        "leaves tile s",
    ),
    "elements of SBUF": (
        copy(at(2, ONE), at(2, (0, 2), (1, 32_768))),
        copy(at(2, ONE), at(2, (0, 2), (1, 32_769))),
        "at most 65536 elements per partition, got 65538",
    ),
    "elements of PSUM": (
        copy(at(0, ONE), at(1, (0, 1), (1, 4_096))),
        copy(at(0, ONE), at(1, (0, 2), (1, 2_049))),
        "at most 4096 elements per partition, got 4098",
    ),
    "stride of a dim": (
        copy(at(0, ONE), at(0, (32_767, 2))),
        copy(at(0, ONE), at(0, (32_768, 2))),
        "leaves its 16-bit field",
    ),
    "stride backwards": (
        copy(at(0, ONE), at(0, (-32_767, 2), offset=40_000)),
        copy(at(0, ONE), at(0, (-32_768, 2), offset=40_000)),
        "leaves its 16-bit field",
    ),
    "size of a dim": (
        copy(at(0, ONE), at(0, (0, 65_535))),
        copy(at(0, ONE), at(0, (0, 65_536))),
        "leaves its 16-bit field",
    ),
    "HBM": (
        Instr("dma", Engine.DMA_IN, at(0, ONE), (HBM,)),
        Instr("tensor_copy", VECTOR, at(0, ONE), (HBM,)),
        "vector cannot touch HBM",
    ),
    "PSUM of GpSimd": (
        copy(at(1, ONE), at(0, ONE)),
        copy(at(1, ONE), at(0, ONE), GPSIMD),
        "gpsimd cannot touch PSUM",
    ),
    "PSUM of DMA": (
        Instr("dma", Engine.DMA_OUT, HBM, (at(0, ONE),)),
        Instr("dma", Engine.DMA_OUT, HBM, (at(1, ONE),)),
        "dma_out cannot touch PSUM",
    ),
    "engine": (
        copy(at(0, ONE), at(0, ONE), Engine.SCALAR),
        copy(at(0, ONE), at(0, ONE), TENSOR),
        "tensor_copy cannot be issued by tensor",
    ),
    "sources": (
        copy(at(0, ONE), at(0, ONE)),
        Instr("tensor_copy", VECTOR, at(0, ONE), (at(0, ONE), at(0, ONE))),
        "requires \\(1,\\) sources, got 2",
    ),
    "destinations": (
        copy(at(0, ONE), at(0, ONE)),
        replace(copy(at(0, ONE), at(0, ONE)), row_sum=at(0, ONE)),
        "has one destination",
    ),
}


def product(m: int, n: int, k: int, **more: Any) -> Instr:
    given = {
        "dst": at(1, (1, n), rows=m),
        "left": at(0, (1, m), rows=k),
        "right": at(0, (1, n), rows=k),
    }
    given |= more
    return Instr("matmul", TENSOR, given["dst"], (given["left"], given["right"]))


def test_short_floats_are_multiplied_with_other_short_floats() -> None:
    """Only fp32 goes with itself alone."""
    own = tiles()
    own[3] = replace(own[3], dtype=DType.F16)
    mixed = product(8, 8, 8, left=at(2, (1, 8)), right=at(3, (1, 8)))
    assert findings(mixed, own) == []
    for number in (2, 3):
        wide = product(8, 8, 8, left=at(number, (1, 8)))
        (text,) = findings(wide, own)
        assert "fp32 only with fp32" in text


def transposed(p: int, f: int, **more: Any) -> Instr:
    given = {"dst": at(1, (1, p), rows=f), "src": at(0, (1, f), rows=p)} | more
    return Instr("transpose", TENSOR, given["dst"], (given["src"],))


EDGES |= {
    "stationary": (product(128, 512, 128), product(129, 8, 8, dst=at(1, (1, 8))), "got 8, 129, 8"),
    "moving": (
        product(8, 512, 8),
        product(8, 513, 8, dst=at(1, (1, 8))),
        "128, 128, 512, got 8, 8, 513",
    ),
    "types": (
        product(8, 8, 8, left=at(2, (1, 8)), right=at(2, (1, 8))),
        product(8, 8, 8, left=at(2, (1, 8))),
        "fp32 only with fp32",
    ),
    "integers": (
        product(8, 8, 8),
        product(8, 8, 8, left=at(3, (1, 8)), right=at(3, (1, 8))),
        "requires float operands",
    ),
    "integers beside floats": (
        product(8, 8, 8),
        product(8, 8, 8, left=at(2, (1, 8)), right=at(3, (1, 8))),
        "requires float operands",
    ),
    "operands": (
        product(8, 8, 8),
        product(8, 8, 8, right=at(1, (1, 8))),
        "requires operands in SBUF",
    ),
    "bank": (  # bytes 1024 to 2047, and one element more
        product(8, 256, 8, dst=at(1, (1, 256), offset=256)),
        product(8, 257, 8, dst=at(1, (1, 257), offset=256)),
        "leaves its PSUM bank of 2048 bytes",
    ),
    "next bank": (
        product(8, 512, 8, dst=at(1, (1, 512), offset=512)),
        product(8, 512, 8, dst=at(1, (1, 512), offset=511)),
        "leaves its PSUM bank",
    ),
    "steps of whole banks": (
        product(8, 512, 8, dst=at(1, (1, 512), offset=Affine(0, ((0, 1024),)))),
        product(8, 512, 8, dst=at(1, (1, 512), offset=Affine(0, ((0, 1024), (1, 256))))),
        "leaves its PSUM bank",
    ),
    "accumulator": (
        product(8, 8, 8),
        product(8, 8, 8, dst=at(0, (1, 8), rows=8)),
        "requires a fp32 destination in PSUM, got s",
    ),
    "accumulator in bf16": (
        product(8, 8, 8),
        product(8, 8, 8, dst=at(4, (1, 8), rows=8)),
        "requires a fp32 destination in PSUM, got h",
    ),
    "rows transposed": (transposed(128, 128), transposed(8, 129, dst=at(1, (1, 8))), "got 8 x 129"),
    "from PSUM": (
        transposed(8, 8),
        transposed(8, 8, src=at(1, (1, 8), rows=8)),
        "requires its source in SBUF",
    ),
    "transposed to SBUF": (
        transposed(8, 8),
        transposed(8, 8, dst=at(0, (1, 8), rows=8)),
        "destination in PSUM",
    ),
}


def summed(rows: Any) -> Instr:
    return Instr("activation_reduce", Engine.SCALAR, at(0, (1, 9)), (at(0, (1, 9)),), row_sum=rows)


EDGES |= {
    "sums of rows": (
        summed(at(0, ONE)),
        summed(at(0, ONE, rows=64)),
        r"shape \[128, 1\], got \[64, 1\]",
    ),
    "one sum of a row": (summed(at(0, ONE, ONE)), summed(at(0, (1, 2))), r"got \[128, 2\]"),
    "sums in fp32": (summed(at(1, ONE)), summed(at(2, ONE)), "requires sums in fp32, got bf16"),
    "no sums": (summed(at(0, ONE)), summed(None), "requires a second destination"),
}


@pytest.mark.parametrize("edge", EDGES)
def test_the_last_legal_figure_and_the_first_beyond(edge: str) -> None:
    legal, illegal, text = EDGES[edge]
    assert findings(legal) == []
    found = findings(illegal)
    assert len(found) == 1 and found[0].startswith(f"{illegal.opcode}: "), found
    assert re.search(text, found[0]), found


def test_rotating_slots_of_whole_banks() -> None:
    """A slot of 512 fp32 is a bank; one of 256 begins in the middle of one every other time."""
    own = tiles()
    half = product(8, 256, 8)
    own[1] = replace(own[1], elements=512, slots=2)
    assert findings(half, own) == []
    own[1] = replace(own[1], elements=256)
    assert len(findings(half, own)) == 1
    own[1] = replace(own[1], slots=1, address=1024)
    assert findings(half, own) == []
    own[1] = replace(own[1], address=1028)
    assert len(findings(half, own)) == 1


def test_a_scatter_places_rows_itself_and_dma_has_no_fields() -> None:
    """Its rows may have step 0; DMA starts at any partition and moves any number of elements."""
    rows = AccessPattern(Space.HBM, 0, Affine(), ((0, 128), (1, 4)))
    index = at(3, ONE)
    attrs = {"row_stride": 4, "rows": 9}
    assert findings(Instr("dma_scatter", Engine.DMA_OUT, rows, (at(0, (1, 4)), index), attrs)) == []
    flat = replace(rows, dims=((0, 128), (0, 4)))
    assert len(findings(Instr("dma_scatter", Engine.DMA_OUT, flat, (at(0, (1, 4)), index), attrs)))
    assert len(findings(Instr("dma", Engine.DMA_OUT, rows, (at(0, (1, 4)),)))) == 1
    odd = at(2, (0, 70_000), (40_000, 1), rows=5, start=3)
    assert findings(Instr("dma", Engine.DMA_OUT, HBM, (odd,))) == []


def test_unknown_instructions() -> None:
    assert findings(Instr("jump", VECTOR, None)) == ["unknown instruction jump"]


def test_tiles_and_semaphores_of_a_kernel() -> None:
    """Bytes of a partition: 196,608 of SBUF, 16,384 of PSUM; 128 partitions; 256 semaphores."""
    wide = [replace(t, address=a) for t, a in zip(tiles()[:2], (0, 0), strict=True)]
    body = [Loop(0, 2, [copy(at(0, (1, 0), offset=1), at(0, ONE))])]
    kernel = Kernel(KernelProgram("compute", "r"), wide, [], tokens=(0,) * 256)
    assert check_kernel(kernel, LIMITS) == []
    texts = []
    for n, change in (
        (0, {"address": 1}),
        (1, {"slots": 2}),
        (0, {"address": -1}),
        (1, {"partitions": 129}),
        (0, {"partitions": 0}),
    ):
        own = list(wide)
        own[n] = replace(own[n], **change)
        texts += check_kernel(replace(kernel, tiles=own), LIMITS)
    assert texts == [
        "r: tile s requires bytes 0..196608, got 1..196609",
        "r: tile p requires bytes 0..16384, got 0..32768",
        "r: tile s requires bytes 0..196608, got -1..196607",
        "r: tile p requires 1..128 partitions, got 129",
        "r: tile s requires 1..128 partitions, got 0",
    ]
    many = replace(kernel, tokens=(0,) * 257, body=body)
    assert check_kernel(many, LIMITS) == [
        "r: tensor_copy: requires positive sizes, got (128, 0)",
        "r: requires at most 256 semaphores, got 257",
    ]
    assert list(walk(body)) == body[0].body
