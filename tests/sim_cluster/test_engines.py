"""What every instruction does to values, against NumPy, with the rounding of each engine."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.instructions import INSTRUCTIONS, TOKENS_ONLY
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Space
from shardwright.sim_cluster.instructions.engines import DECODERS

F32, BF16, I32, PRED = DType.F32, DType.BF16, DType.I32, DType.PRED
VEC, GPS, SCA, TEN = Engine.VECTOR, Engine.GPSIMD, Engine.SCALAR, Engine.TENSOR
BF = ml_dtypes.bfloat16


def run(
    opcode: str,
    engine: Engine,
    out: np.ndarray,
    *srcs: np.ndarray,
    registers: dict[int, int] | None = None,
    row_sum: np.ndarray | None = None,
    **attrs: Any,
) -> np.ndarray:
    def pattern(array: np.ndarray) -> AccessPattern:
        return AccessPattern(Space.SBUF, 0, Affine(), tuple((1, n) for n in array.shape))

    instr = Instr(opcode, engine, pattern(out), tuple(pattern(s) for s in srcs), attrs)
    second = () if row_sum is None else (row_sum,)
    instr.row_sum = None if row_sum is None else pattern(row_sum)
    dtypes = tuple(DType.from_numpy(s.dtype) for s in srcs)
    execute = DECODERS[opcode](instr, DType.from_numpy(out.dtype), dtypes)
    execute(out, (*srcs, *second), registers or {})
    return out


def rand(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_every_instruction_has_a_decoder() -> None:
    assert DECODERS.keys() == INSTRUCTIONS.keys() - set(TOKENS_ONLY)


def test_matmul_overwrites_when_all_registers_are_zero() -> None:
    a, b, out = rand(5, 3), rand(5, 7), np.full((3, 7), 2, np.float32)
    run("matmul", TEN, out, a, b, registers={1: 0, 2: 0}, zero_when=(1, 2))
    np.testing.assert_allclose(out, a.T @ b, rtol=1e-6)
    run("matmul", TEN, out, a, b, registers={1: 0, 2: 1}, zero_when=(1, 2))
    run("matmul", TEN, out, a, b, zero_when=None)
    np.testing.assert_allclose(out, 3 * (a.T @ b), rtol=1e-5)


def test_transpose() -> None:
    x = rand(4, 6)
    np.testing.assert_array_equal(run("transpose", TEN, np.zeros((6, 4), np.float32), x), x.T)


def test_vector_computes_integers_in_fp32_and_gpsimd_exactly() -> None:
    a = np.full((2, 3), 2**24 + 1, np.int32)
    one = np.ones((2, 3), np.int32)
    exact = run("tensor_tensor", GPS, np.zeros((2, 3), np.int32), a, one, op="add")
    rounded = run("tensor_tensor", VEC, np.zeros((2, 3), np.int32), a, one, op="add")
    assert exact[0, 0] == 2**24 + 2 and rounded[0, 0] == 2**24
    bits = run("tensor_tensor", VEC, np.zeros((2, 3), np.int32), a, one, op="and")
    assert bits[0, 0] == 1


@pytest.mark.parametrize(("op", "fn"), [("GT", np.greater), ("EQ", np.equal)])
@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.int32])
def test_compare_writes_ones_of_any_type(op: str, fn: Any, dtype: Any) -> None:
    a, b = rand(3, 4), np.zeros((3, 4), np.float32)
    out = run("tensor_tensor", VEC, np.zeros((3, 4), dtype), a, b, op=op)
    np.testing.assert_array_equal(out, fn(a, b).astype(dtype))


def test_tensor_scalar_stages_reverse_and_per_partition_scalars() -> None:
    x, s = rand(3, 4), rand(3, 1)
    attrs = {
        "op0": "subtract",
        "scalar0": 1.5,
        "reverse0": True,
        "op1": "multiply",
        "scalar1": None,
    }
    out = run("tensor_scalar", VEC, np.zeros((3, 4), np.float32), x, s, reverse1=False, **attrs)
    np.testing.assert_allclose(out, (np.float32(1.5) - x) * s, rtol=1e-6)
    attrs = {"op0": "GT", "scalar0": 0.0, "op1": "multiply", "scalar1": 8.0}
    out = run("tensor_scalar", VEC, np.zeros((3, 4), np.float32), x, **attrs)
    np.testing.assert_array_equal(out, (x > 0) * 8.0)


@pytest.mark.parametrize("op", ["add", "max", "minimum", "multiply"])
def test_tensor_reduce_combines_with_the_old_value(op: str) -> None:
    x, out = rand(3, 4, 5), np.full((3, 1), 0.5, np.float32)
    kind = {"add": np.add, "max": np.maximum, "minimum": np.minimum, "multiply": np.multiply}[op]
    want = kind.reduce(x.reshape(3, 20), axis=1, keepdims=True)
    run("tensor_reduce", VEC, out, x, op=op, num_reduced=2, zero_when=None)
    np.testing.assert_allclose(out, kind(np.float32(0.5), want), rtol=1e-5)
    run("tensor_reduce", VEC, out, x, op=op, num_reduced=2, zero_when=())
    np.testing.assert_allclose(out, want, rtol=1e-5)


def test_stores_round_to_nearest_even_and_saturate() -> None:
    x = np.array([[0.5, 1.5, -2.5, 3e9, -3e9, np.nan]], np.float32)
    out = run("tensor_copy", VEC, np.zeros((1, 6), np.int32), x)
    assert out.tolist() == [[0, 2, -2, 2**31 - 1, -(2**31), 0]]
    tie = np.array([[1 + 2**-8, 1 + 3 * 2**-8]], np.float32)
    out = run("tensor_copy", SCA, np.zeros((1, 2), BF), tie)
    assert out.astype(np.float32).tolist() == [[1.0, 1 + 2**-6]]


def test_activation_with_scale_and_bias_of_both_kinds() -> None:
    x, scale, bias = rand(3, 4), rand(3, 1), rand(3, 1)[::-1].copy()
    out = np.zeros((3, 4), np.float32)
    run("activation", SCA, out, x, scale, bias, func="tanh", scale=None, bias=None)
    np.testing.assert_allclose(out, np.tanh(x * scale + bias), rtol=1e-6)
    run("activation", SCA, out, x, bias, func="exponential", scale=2.0, bias=None)
    np.testing.assert_allclose(out, np.exp(2 * x + bias), rtol=1e-6)
    run("activation", SCA, out, x, func="identity", scale=-1.0, bias=0.5)
    np.testing.assert_allclose(out, 0.5 - x, rtol=1e-6)


def test_activation_reduce_sums_what_it_has_not_rounded_yet() -> None:
    x, bias = rand(3, 2, 40), rand(3, 1)
    out, sums = np.zeros((3, 2, 40), BF), np.full((3, 1), 9, np.float32)
    attrs = {"func": "exponential", "scale": 2.0, "bias": None}
    run("activation_reduce", SCA, out, x, bias, row_sum=sums, **attrs)
    want = np.exp(2 * x + bias[:, :, None])
    np.testing.assert_array_equal(out, want.astype(BF))
    np.testing.assert_allclose(sums[:, 0], want.sum((1, 2)), rtol=1e-6)
    assert abs(out.astype(np.float32).sum((1, 2)) / want.sum((1, 2)) - 1).max() > 1e-5


def test_bf16_operands_are_computed_in_fp32() -> None:
    a, b = rand(3, 4).astype(BF), rand(3, 4, 1)[..., 0].astype(BF)
    out = run("tensor_tensor", VEC, np.zeros((3, 4), BF), a, b, op="multiply")
    want = (a.astype(np.float32) * b.astype(np.float32)).astype(BF)
    np.testing.assert_array_equal(out.view(np.uint16), want.view(np.uint16))


def test_iota_memset_select_bitcast_unary() -> None:
    out = np.zeros((3, 2, 4), np.int32)
    run(
        "iota",
        GPS,
        out,
        start=Affine(5, ((1, 2),)),
        partition_step=-1,
        steps=(10, 1),
        registers={1: 3},
    )
    p, i, j = np.indices(out.shape)
    np.testing.assert_array_equal(out, 11 - p + 10 * i + j)
    assert run("memset", GPS, np.zeros((2, 2), np.int32), value=7).tolist() == [[7, 7], [7, 7]]
    pred, a, b = np.array([[True, False]]), np.array([[1.0, np.nan]], np.float32), rand(1, 2)
    picked = run("select", VEC, np.zeros((1, 2), np.float32), pred, a, b)
    np.testing.assert_array_equal(picked, [[1.0, b[0, 1]]])
    bits = run("bitcast_copy", VEC, np.zeros((1, 2), np.int32), np.array([[1.0, -0.0]], np.float32))
    assert bits.tolist() == [[0x3F800000, -(2**31)]]
    finite = run("tensor_unary", VEC, np.zeros((1, 2), np.bool_), a, op="is_finite")
    assert finite.tolist() == [[True, False]]


def test_affine_select_keeps_where_the_pattern_says_so() -> None:
    x, steps = rand(3, 2, 4), {"partition_step": -1, "steps": (10, 1)}
    p, i, j = np.indices(x.shape)
    out = run(
        "affine_select",
        GPS,
        np.zeros(x.shape, np.float32),
        x,
        start=Affine(-17, ((1, 2),)),
        direction="GT",
        fill=-np.inf,
        registers={1: 3},
        **steps,
    )
    want = np.where(-11 - p + 10 * i + j > 0, x, -np.inf).astype(np.float32)
    np.testing.assert_array_equal(out, want)
    assert np.isinf(out).any() and np.isfinite(out).any()


@pytest.mark.parametrize("mode", ["clamp", "fill"])
def test_gather_of_rows(mode: str) -> None:
    table, index = rand(6, 4), np.array([[5], [-1], [2], [9]], np.int32)
    out = np.zeros((4, 4), np.float32)
    shown = np.zeros((4, 4), np.float32)  # the pattern of one row per partition

    def pattern(array: np.ndarray) -> AccessPattern:
        return AccessPattern(Space.SBUF, 0, Affine(), tuple((1, n) for n in array.shape))

    attrs = {"row_stride": 4, "rows": 6, "mode": mode}
    srcs = (pattern(shown), pattern(index))
    instr = Instr("dma_gather", Engine.DMA_IN, pattern(out), srcs, attrs)
    DECODERS["dma_gather"](instr, F32, (F32, I32))(out, (table, index), {})
    want = table[[5, 0, 2, 5]]
    if mode == "fill":
        want[[1, 3]] = 0
    np.testing.assert_array_equal(out, want)


def test_dma_casts_integers_exactly_and_floats_to_nearest_even() -> None:
    big = np.array([[2**24 + 1, -7]], np.int64)
    assert run("dma", Engine.DMA_IN, np.zeros((1, 2), np.int32), big).tolist() == big.tolist()
    x = np.array([[2.5, -1.25]], BF)
    assert run("dma", Engine.DMA_IN, np.zeros((1, 2), np.int32), x).tolist() == [[2, -1]]


@pytest.mark.parametrize("dtype", [np.float32, BF])
def test_signs_of_zeros_and_nan_stay(dtype: Any) -> None:
    x = np.array([[-0.0, 0.0, -3, 0.5, np.nan, -np.inf]], np.float32).astype(dtype)
    out = run("tensor_unary", VEC, np.empty((1, 6), dtype), x, op="sign").astype(np.float32)
    np.testing.assert_array_equal(out, [[-0.0, 0.0, -1, 1, np.nan, -1]])
    assert np.signbit(out[0, :2]).tolist() == [True, False]
