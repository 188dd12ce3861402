"""Times of instructions and transfers, each worked out by hand from the page that documents it.

Sources: OLD is nki/api/nki/isa/__init__.py at aws-neuron-sdk commit 49ee15c5, cycles of the issuing
engine with N elements per partition; K1 and K2 are the architecture pages of trn1 and trn2, with
the clocks; DB is the DMA bandwidth guide, DO the DMA overview. No constant of the program is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.costs import instr_interval_ps
from shardwright.compiler.isa.kernel import Affine, Tensor
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Space, Tile
from shardwright.compiler.machine.target import load_target

F32, BF16 = DType.F32, DType.BF16
SBUF, PSUM, HBM = Space.SBUF, Space.PSUM, Space.HBM
VECTOR, SCALAR, GPSIMD = Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD
TENSOR, LOAD, STORE = Engine.TENSOR, Engine.DMA_IN, Engine.DMA_OUT

Operand = tuple[Space, DType, tuple[tuple[int, int], ...]]


def rows(elements: int, dtype: DType = F32, space: Space = SBUF, step: int = 1) -> Operand:
    """128 partitions of so many elements, `step` apart."""
    return space, dtype, ((1, 128), (step, elements))


def interval_ps(opcode: str, engine: Engine, *operands: Operand, on: str, **attrs: Any) -> int:
    """Interval of an instruction; the first operand is its destination."""
    instr, tiles, tensors = instruction(opcode, engine, *operands, **attrs)
    return instr_interval_ps(instr, tiles, tensors, load_target(on).core)


def instruction(
    opcode: str, engine: Engine, *operands: Operand, **attrs: Any
) -> tuple[Instr, list[Tile], list[Tensor]]:
    """An instruction over a tile or tensor per operand; the first one is its destination."""
    patterns, tiles, tensors = [], list[Tile](), list[Tensor]()
    for space, dtype, dims in operands:
        if space is HBM:
            patterns.append(AccessPattern(space, len(tensors), Affine(), dims))
            tensors.append(Tensor("x", (1,), dtype, "input"))
        else:
            patterns.append(AccessPattern(space, len(tiles), Affine(), dims))
            tiles.append(Tile("x", space, 128, 1, dtype))
    return Instr(opcode, engine, patterns[0], tuple(patterns[1:]), attrs), tiles, tensors


A, A16, P = rows(300), rows(300, BF16), rows(300, F32, PSUM)

# Operands, attributes, picoseconds on trn1n: cycles / 1.12 GHz (K1).
ON_VECTOR: dict[str, tuple[str, tuple[Operand, ...], dict[str, Any], int]] = {
    # OLD: tensor_tensor is max(64, 2N): 2 * 300 = 600; 600 / 1.12 = 535,714.3 ns / 1000
    "two in SBUF": ("tensor_tensor", (A, A, A), {"op": "add"}, 535_714),
    "two in PSUM": ("tensor_tensor", (A, P, P), {"op": "add"}, 535_714),
    # OLD: max(64, N) with one input in PSUM and one in SBUF: 300 / 1.12
    "PSUM and SBUF": ("tensor_tensor", (A, P, A), {"op": "add"}, 267_857),
    # OLD: max(64, N) when both are bf16 in SBUF, unit stride, add, multiply or subtract
    "bf16 add": ("tensor_tensor", (A16, A16, A16), {"op": "add"}, 267_857),
    "bf16 multiply": ("tensor_tensor", (A16, A16, A16), {"op": "multiply"}, 267_857),
    "bf16 subtract": ("tensor_tensor", (A16, A16, A16), {"op": "subtract"}, 267_857),
    "bf16 maximum": ("tensor_tensor", (A16, A16, A16), {"op": "maximum"}, 535_714),
    "bf16 into fp32": ("tensor_tensor", (A, A16, A16), {"op": "add"}, 535_714),
    "bf16 with stride": (
        "tensor_tensor",
        (A16, A16, rows(300, BF16, step=2)),
        {"op": "add"},
        535_714,
    ),
    # The least interval is 64 cycles: 64 / 1.12 = 57.1; 2 * 33 = 66 / 1.12 = 58.9
    "shortest": ("tensor_tensor", (rows(20),) * 3, {"op": "add"}, 57_143),
    "just above": ("tensor_tensor", (rows(33),) * 3, {"op": "add"}, 58_929),
    "bf16 shortest": ("tensor_tensor", (rows(63, BF16),) * 3, {"op": "add"}, 57_143),
    "bf16 just above": ("tensor_tensor", (rows(65, BF16),) * 3, {"op": "add"}, 58_036),
    # OLD: reciprocal is max(64, 8N): 8 * 300 = 2400 / 1.12; division has no row of its own
    "divide": ("tensor_tensor", (A, A, A), {"op": "divide"}, 2_142_857),
    "bf16 divide": ("tensor_tensor", (A16, A16, A16), {"op": "divide"}, 2_142_857),
    "remainder": ("tensor_tensor", (A, A, A), {"op": "remainder"}, 2_142_857),
    "power": ("tensor_tensor", (A, A, A), {"op": "power"}, 2_142_857),
    "short divide": ("tensor_tensor", (rows(7),) * 3, {"op": "divide"}, 57_143),
    "divide by a number": ("tensor_scalar", (A, A), {"op0": "divide"}, 2_142_857),
    "short divide by a number": ("tensor_scalar", (rows(7),) * 2, {"op0": "divide"}, 57_143),
    "reciprocal": ("tensor_unary", (A, A), {"op": "reciprocal"}, 2_142_857),
    "short reciprocal": ("tensor_unary", (rows(7),) * 2, {"op": "reciprocal"}, 57_143),
    # OLD: tensor_scalar is max(64, N), two operators included: 300 / 1.12
    "two operators": ("tensor_scalar", (A, A), {"op0": "add", "op1": "multiply"}, 267_857),
    "short tensor_scalar": ("tensor_scalar", (rows(5),) * 2, {"op0": "add"}, 57_143),
    "random bits": ("tensor_scalar", (A, A), {"op0": "random_bits"}, 267_857),
    "short random bits": ("tensor_scalar", (rows(5),) * 2, {"op0": "random_bits"}, 57_143),
    "negate": ("tensor_unary", (A, A), {"op": "negate"}, 267_857),
    "short negate": ("tensor_unary", (rows(5),) * 2, {"op": "negate"}, 57_143),
    # OLD: tensor_reduce is N/2 for bf16 add and max, else N: 150 or 300 / 1.12
    "bf16 sum": ("tensor_reduce", (rows(1, BF16), A16), {"op": "add"}, 133_929),
    "bf16 maximum of": ("tensor_reduce", (rows(1, BF16), A16), {"op": "maximum"}, 133_929),
    "bf16 minimum of": ("tensor_reduce", (rows(1, BF16), A16), {"op": "minimum"}, 267_857),
    "bf16 sum in fp32": ("tensor_reduce", (rows(1), A16), {"op": "add"}, 267_857),
    "sum": ("tensor_reduce", (rows(1), A), {"op": "add"}, 267_857),
    "short sum": ("tensor_reduce", (rows(1), rows(9)), {"op": "add"}, 57_143),
    "short bf16 sum": ("tensor_reduce", (rows(1, BF16), rows(9, BF16)), {"op": "add"}, 57_143),
    # OLD: tensor_copy is max(64, N)
    "copy": ("tensor_copy", (A, P), {}, 267_857),
    "short copy": ("tensor_copy", (rows(5), rows(5)), {}, 57_143),
    "bits": ("bitcast_copy", (A, A), {}, 267_857),
    "short bits": ("bitcast_copy", (rows(5), rows(5)), {}, 57_143),
    # OLD: tensor_copy_predicated is max(64, N) across memories, max(64, 2N) inside SBUF
    "select from PSUM": ("select", (A, A, P, A), {}, 267_857),
    "select in SBUF": ("select", (A, A, A, A), {}, 535_714),
    "short select": ("select", (rows(5),) * 4, {}, 57_143),
    "short select from PSUM": ("select", (rows(5), rows(5, F32, PSUM), rows(5)), {}, 57_143),
    # OLD: memset is max(64, N/2) for a 2-byte type, else max(64, N)
    "bf16 fill": ("memset", (A16,), {"value": 0.0}, 133_929),
    "fill": ("memset", (A,), {"value": 0.0}, 267_857),
    "short bf16 fill": ("memset", (rows(70, BF16),), {"value": 0.0}, 57_143),
    "short fill": ("memset", (rows(5),), {"value": 0.0}, 57_143),
    # K1: an innermost stride over 16 bytes halves the rate: 600 / 1.12; 16 bytes do not
    "20 bytes apart": ("tensor_copy", (A, rows(300, step=5)), {}, 535_714),
    "20 bytes apart, backwards": ("tensor_copy", (A, rows(300, step=-5)), {}, 535_714),
    "written 20 bytes apart": ("tensor_copy", (rows(300, step=5), A), {}, 535_714),
    "16 bytes apart": ("tensor_copy", (A, rows(300, step=4)), {}, 267_857),
    "bf16 18 bytes apart": ("tensor_copy", (A16, rows(300, BF16, step=9)), {}, 535_714),
    "bf16 16 bytes apart": ("tensor_copy", (A16, rows(300, BF16, step=8)), {}, 267_857),
}


@pytest.mark.parametrize("case", ON_VECTOR)
def test_vector_instructions(case: str) -> None:
    opcode, operands, attrs, wanted = ON_VECTOR[case]
    assert interval_ps(opcode, VECTOR, *operands, on="trn1n.32xlarge", **attrs) == wanted


# Scalar and GpSimd of trn1n run at 1.4 GHz (K1).
ON_OTHERS: dict[str, tuple[str, Engine, tuple[Operand, ...], int]] = {
    # OLD: activation is max(64, N): 300 / 1.4 = 214,285.7; 64 / 1.4 = 45,714.3
    "activation": ("activation", SCALAR, (A, A), 214_286),
    "short activation": ("activation", SCALAR, (rows(5), rows(5)), 45_714),
    # OLD: 64 cycles more to read the accumulator: 364 / 1.4; 128 / 1.4
    "with sums": ("activation_reduce", SCALAR, (A, A), 260_000),
    "short with sums": ("activation_reduce", SCALAR, (rows(5), rows(5)), 91_429),
    "copy by Scalar": ("tensor_copy", SCALAR, (A, P), 214_286),
    # OLD: iota and affine_select are 150 + N: 450 / 1.4 = 321,428.6
    "iota": ("iota", GPSIMD, (A,), 321_429),
    "affine_select": ("affine_select", GPSIMD, (A, A), 321_429),
    "short iota": ("iota", GPSIMD, (rows(5),), 110_714),  # 155 / 1.4
    "short affine_select": ("affine_select", GPSIMD, (rows(5), rows(5)), 110_714),
    # K1 gives no general rule; the sheet's default is 150 + N
    "copy by GpSimd": ("tensor_copy", GPSIMD, (A, A), 321_429),
    "short copy by GpSimd": ("tensor_copy", GPSIMD, (rows(5), rows(5)), 110_714),
    "add by GpSimd": ("tensor_tensor", GPSIMD, (A, A, A), 321_429),
    "short add by GpSimd": ("tensor_tensor", GPSIMD, (rows(5),) * 3, 110_714),
    # K1: partitions that are far apart are no stride of a row: 151 / 1.4
    "one each, 36 bytes apart": ("tensor_copy", GPSIMD, ((SBUF, F32, ((9, 128),)),) * 2, 107_857),
}


@pytest.mark.parametrize("case", ON_OTHERS)
def test_scalar_and_gpsimd_instructions(case: str) -> None:
    opcode, engine, operands, wanted = ON_OTHERS[case]
    assert interval_ps(opcode, engine, *operands, on="trn1n.32xlarge", op="add") == wanted


def packed(depth: int, free: int, dtype: DType = BF16, *inner: tuple[int, int]) -> Operand:
    """`depth` partitions of `free` elements."""
    return SBUF, dtype, ((1, depth), (1, free), *inner)


OUT = rows(512, F32, PSUM)
# Tensor of trn1n runs at 2.8 GHz (K1).
ON_TENSOR: dict[str, tuple[str, tuple[Operand, ...], int]] = {
    # OLD: matmul is max(min(64, N_stationary), N_moving): 500 / 2.8 = 178,571.4
    "tile": ("matmul", (OUT, packed(128, 128), packed(128, 500)), 178_571),
    "narrow moving": ("matmul", (OUT, packed(128, 100), packed(128, 32)), 22_857),  # 64 / 2.8
    "narrow both": ("matmul", (OUT, packed(128, 48), packed(128, 32)), 17_143),  # 48 / 2.8
    # All free dims count: 12 * 10 = 120 / 2.8 = 42,857.1
    "moving of two dims": ("matmul", (OUT, packed(8, 8), packed(8, 12, BF16, (12, 10))), 42_857),
    "stationary of two dims": ("matmul", (OUT, packed(8, 6, BF16, (6, 9)), packed(8, 2)), 19_286),
    # OLD: fp32 takes four passes: 2000 / 2.8 and 4 * 48 = 192 / 2.8
    "fp32 tile": ("matmul", (OUT, packed(128, 128, F32), packed(128, 500, F32)), 714_286),
    "fp32 narrow": ("matmul", (OUT, packed(128, 48, F32), packed(128, 32, F32)), 68_571),
    # OLD: transpose is max(P, min(64, F)): 100 / 2.8; 64 / 2.8; 40 / 2.8; fp32 400 / 2.8
    "transpose": ("transpose", (OUT, packed(100, 32)), 35_714),
    "transpose of few rows": ("transpose", (OUT, packed(40, 100)), 22_857),
    "transpose of few": ("transpose", (OUT, packed(40, 20)), 14_286),
    "transpose of a block": ("transpose", (OUT, packed(10, 5, BF16, (5, 9))), 16_071),  # 45 / 2.8
    "fp32 transpose": ("transpose", (OUT, packed(100, 32, F32)), 142_857),
}


@pytest.mark.parametrize("case", ON_TENSOR)
def test_tensor_instructions(case: str) -> None:
    opcode, operands, wanted = ON_TENSOR[case]
    assert interval_ps(opcode, TENSOR, *operands, on="trn1n.32xlarge") == wanted


@pytest.mark.parametrize(
    ("on", "vector", "scalar", "gpsimd", "tensor"),
    [
        # K2: 0.96, 1.2, 1.2 and 2.4 GHz: 600 / 0.96, 300 / 1.2, 450 / 1.2, 500 / 2.4
        ("trn2.48xlarge", 625_000, 250_000, 375_000, 208_333),
        # K3: 1.2, 1.2, 1.2 and 2.4 GHz
        ("trn3-gen1-ultraserver", 500_000, 250_000, 375_000, 208_333),
    ],
)
def test_newer_cores_differ_by_their_clocks(
    on: str, vector: int, scalar: int, gpsimd: int, tensor: int
) -> None:
    assert interval_ps("tensor_tensor", VECTOR, A, A, A, on=on, op="add") == vector
    assert interval_ps("activation", SCALAR, A, A, on=on) == scalar
    assert interval_ps("iota", GPSIMD, A, on=on) == gpsimd
    assert interval_ps("matmul", TENSOR, OUT, packed(128, 128), packed(128, 500), on=on) == tensor


def test_waits_and_signals_take_no_time_and_other_engines_no_instructions_of_vector() -> None:
    for opcode in ("wait", "signal"):
        bare = Instr(opcode, VECTOR, None)
        assert instr_interval_ps(bare, [], [], load_target("trn1n.32xlarge").core) == 0
    with pytest.raises(KeyError, match="no cost rule for select on scalar"):
        interval_ps("select", SCALAR, A, A, A, A, on="trn1n.32xlarge")
    with pytest.raises(KeyError, match="no cost rule for activation on vector"):
        interval_ps("activation", VECTOR, A, A, on="trn1n.32xlarge")


def hbm(dtype: DType, *dims: tuple[int, int]) -> Operand:
    """A window of a tensor in HBM."""
    return HBM, dtype, dims


def tile(partitions: int, *dims: tuple[int, int], dtype: DType = F32) -> Operand:
    """A window of a tile in SBUF."""
    return SBUF, dtype, ((1, partitions), *dims)


# On trn1n 16 engines sustain 17 B/ns each (DB). An engine serves 8 partitions, and a descriptor of
# one contiguous run takes max(2400, bytes + 140) / rate (fit of the chart of DO); runs are cut at
# 64 KiB (udma.h).
TRANSFERS: dict[str, tuple[Operand, Operand, int]] = {
    # 128 runs of 4096 B on 16 engines: 8 * 4236 / 17 = 1993.412 ns
    "whole rows": (tile(128, (1, 1024)), hbm(F32, (1024, 128), (1, 1024)), 1_993_412),
    # 100 partitions use ceil(100 / 8) = 13 engines; ceil(100 / 13) = 8 runs of 4000 B on the
    # busiest: 8 * 4140 / 17 = 1948.235 ns
    "100 partitions": (tile(100, (1, 1000)), hbm(F32, (1000, 100), (1, 1000)), 1_948_235),
    # 9 partitions use 2 engines; 5 runs on the busiest: 5 * 4140 / 17 = 1217.647 ns
    "9 partitions": (tile(9, (1, 1000)), hbm(F32, (1000, 9), (1, 1000)), 1_217_647),
    # Runs of 32 B take as long as 2400: 8 * 2400 / 17 = 1129.412 ns
    "short rows": (tile(128, (1, 8)), hbm(F32, (8, 128), (1, 8)), 1_129_412),
    # 565 elements are 2260 + 140 = 2400 B, 566 are 2404: 8 * 2404 / 17 = 1131.294 ns
    "as long as the least": (tile(128, (1, 565)), hbm(F32, (565, 128), (1, 565)), 1_129_412),
    "just longer": (tile(128, (1, 566)), hbm(F32, (566, 128), (1, 566)), 1_131_294),
    # The side with the shorter runs decides: 128 * 16 runs of 32 elements = 128 B, on 16 engines
    # 128 each: 128 * 2400 / 17 = 18070.588 ns
    "blocks in HBM": (
        tile(128, (1, 512)),
        hbm(F32, (4096, 128), (64, 16), (1, 32)),
        18_070_588,
    ),
    "blocks in SBUF": (
        tile(128, (64, 16), (1, 32)),
        hbm(F32, (512, 128), (1, 512)),
        18_070_588,
    ),
    # A run goes on over dims that follow each other: 4 * 256 elements are 4096 B
    "dims that join": (tile(128, (256, 4), (1, 256)), hbm(F32, (1024, 128), (1, 1024)), 1_993_412),
    "a dim of one": (
        tile(128, (1, 1024), (7, 1)),
        hbm(F32, (1024, 128), (1, 1024), (5, 1)),
        1_993_412,
    ),
    # What follows each other on partitions is no run: 8 * 2400 / 17
    "one per partition": (tile(128, (1, 1)), hbm(F32, (1, 128), (1, 1)), 1_129_412),
    # Single elements: 128 * 100 runs of 4 B, 800 per engine: 800 * 2400 / 17 = 112941.176 ns
    "a column": (tile(128, (1, 100)), hbm(F32, (100, 128), (128, 100)), 112_941_176),
    # A cast moves the wider of both: runs of 4000 B either way: 8 * 4140 / 17
    "from bf16": (tile(128, (1, 1000)), hbm(BF16, (1000, 128), (1, 1000)), 1_948_235),
    "to bf16": (tile(128, (1, 1000), dtype=BF16), hbm(F32, (1000, 128), (1, 1000)), 1_948_235),
    # bf16 alone: 2000 + 140 < 2400
    "bf16": (tile(128, (1, 1000), dtype=BF16), hbm(BF16, (1000, 128), (1, 1000)), 1_129_412),
    # HBM to HBM, all 16 engines: 400,000 B are ceil(6.1) = 7 runs of 65,536 B, one per engine:
    # 65676 / 17 = 3863.294 ns; 20 MB are ceil(305.2) = 306 runs, ceil(19.1) = 20 on the busiest;
    # 1,081,344 B are ceil(16.5) = 17 runs, two on the busiest
    "in HBM": (hbm(F32, (1, 100_000)), hbm(F32, (1, 100_000)), 3_863_294),
    "much in HBM": (
        hbm(F32, (1, 5_000_000)),
        hbm(F32, (3_000_000, 2), (1, 2_500_000)),
        77_265_882,
    ),
    "a run too many": (hbm(F32, (1, 270_336)), hbm(F32, (1, 270_336)), 7_726_588),
    # Rows side by side in HBM are one run: 40,000 B + 140 = 40140 / 17 = 2361.176 ns
    "joined in HBM": (hbm(F32, (100, 100), (1, 100)), hbm(F32, (1, 10_000)), 2_361_176),
}


@pytest.mark.parametrize("case", TRANSFERS)
def test_transfers(case: str) -> None:
    dst, src, wanted = TRANSFERS[case]
    assert interval_ps("dma", LOAD, dst, src, on="trn1n.32xlarge") == wanted
    assert interval_ps("dma", STORE, src, dst, on="trn1n.32xlarge") == wanted


@pytest.mark.parametrize(
    ("on", "wanted"),
    [
        ("trn2.48xlarge", 1_473_391),  # 23 GB/s per engine (DB): 8 * 4236 / 23
        ("trn3-gen1-ultraserver", 1_026_909),  # 33 GB/s (DB): 8 * 4236 / 33
    ],
)
def test_transfers_of_newer_cores(on: str, wanted: int) -> None:
    dst, src, _ = TRANSFERS["whole rows"]
    assert interval_ps("dma", LOAD, dst, src, on=on) == wanted


def test_a_core_of_four_engines_takes_four_times_as_long() -> None:
    """32 runs of 4096 B on each: 32 * 4236 / 17 = 7973.647 ns."""
    dst, src, _ = TRANSFERS["whole rows"]
    core = replace(load_target("trn1n.32xlarge").core, dma_engines=4)
    assert instr_interval_ps(*instruction("dma", LOAD, dst, src), core) == 7_973_647


def test_a_gather_is_costed_by_its_rows() -> None:
    """The index, a third operand, moves nothing: 128 bf16 rows of 3000 B, 8 * 3140 / 17."""
    dst, src = tile(128, (1, 1500), dtype=BF16), hbm(BF16, (1500, 128), (1, 1500))
    index = (SBUF, DType.I32, ((1, 128), (1, 1)))
    assert interval_ps("dma_gather", LOAD, dst, src, index, on="trn1n.32xlarge") == 1_477_647
