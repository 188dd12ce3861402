"""Precision options change values as `docs/numerics.md` says, in L0 and L1, against ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError, Loc
from shardwright.compiler.driver import compile_graph
from shardwright.compiler.dtypes import DType, cast
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops.gather import ScatterAttrs
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import Program
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.passes.formats import check_formats
from shardwright.compiler.passes.integers import check_integers
from shardwright.compiler.program import StepProgram
from shardwright.sim_cluster.values import rounding
from shardwright.sim_cluster.values.memory import CoreMemory
from shardwright.sim_cluster.values.programs import ProgramCode
from shardwright.sim_cluster.values.result import distance
from shardwright.sim_cluster.values.run_single import run_single

TARGET = "trn1n.32xlarge"
LEVELS = ("L0", "L1")
TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3,
}


def compiled(graph: Graph, **options: Any) -> Program:
    inputs = tuple(f"arg{i}" for i in range(len(graph.inputs)))
    outputs = tuple(f"out{i}" for i in range(len(graph.outputs)))
    step = StepProgram(name="main", graph=graph, inputs=inputs, outputs=outputs)
    return compile_graph(step, TARGET, CompileOptions(**options))


def results(graph: Graph, arrays: list[np.ndarray], level: str, **options: Any) -> np.ndarray:
    named = {f"arg{i}": a for i, a in enumerate(arrays)}
    return run_single(compiled(graph, **options), named, level)["out0"]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def product(dtype: DType = DType.F32, m: int = 40, k: int = 200, n: int = 56) -> Graph:
    b = Builder()
    x, y = b.input((m, k), dtype), b.input((k, n), dtype)
    return b.finish(b.dot(x, y, dtype=dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sorted(TYPES))
def test_matmult_rounds_operands_and_nothing_else(name: str, level: str) -> None:
    x, y = normal(40, 200), normal(200, 56, seed=1)
    short = [a.astype(TYPES[name]).astype(np.float32) for a in (x, y)]
    got = results(product(), [x, y], level, auto_cast="matmult", auto_cast_type=name)
    assert distance(got, short[0].astype(np.float64) @ short[1]) < 1e-6
    assert distance(got, x @ y) > 1e-4, "the cast has to be visible"


@pytest.mark.parametrize("level", LEVELS)
def test_tf32_keeps_ten_mantissa_bits(level: str) -> None:
    x, y = normal(40, 200), normal(200, 56, seed=1)
    short = [_ten_bits(a).astype(np.float64) for a in (x, y)]
    got = results(product(), [x, y], level, auto_cast="matmult", auto_cast_type="tf32")
    assert distance(got, short[0] @ short[1]) < 1e-6
    assert 1e-5 < distance(got, x @ y) < 1e-3


def _ten_bits(x: np.ndarray) -> np.ndarray:
    """Round to 11 significant bits with frexp: another way than the bit pattern."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2**11) / 2**11, exponent)


def test_tf32_rounding_is_to_nearest_even_and_leaves_infinities() -> None:
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, np.inf, -np.inf, 3.4e38], np.float32)
    wanted = np.array([1, 1 + 2**-9, -1, np.inf, -np.inf, np.inf], np.float32)
    got = cast(x, DType.TF32)
    assert np.array_equal(got[:5], wanted[:5])
    assert np.isnan(cast(np.array([np.nan], np.float32), DType.TF32)).all()


@pytest.mark.parametrize("level", LEVELS)
def test_all_computes_elementwise_code_in_the_short_type(level: str) -> None:
    b = Builder()
    x = b.input((64, 32))
    graph = b.finish(b.op("multiply", b.op("exponential", x), x))
    data = normal(64, 32)
    short = data.astype(ml_dtypes.bfloat16).astype(np.float32)
    step = np.exp(short).astype(ml_dtypes.bfloat16).astype(np.float32)
    wanted = (step * short).astype(ml_dtypes.bfloat16).astype(np.float32)
    got = results(graph, [data], level, auto_cast="all")
    assert got.dtype == np.float32, "outputs are never cast"
    assert distance(got, wanted) < 1e-6


def test_levels_agree_on_accuracy_order() -> None:
    """The documented ranking, most accurate first."""
    x, y = normal(64, 256), normal(256, 64, seed=1)
    b = Builder()
    p, q = b.input((64, 256)), b.input((256, 64))
    graph = b.finish(b.op("tanh", b.dot(p, q)))
    exact = np.tanh(x.astype(np.float64) @ y)
    ladder = [("matmult", "tf32"), ("all", "tf32"), ("matmult", "bf16"), ("all", "bf16")]
    errors = [
        distance(results(graph, [x, y], "L1", auto_cast=mode, auto_cast_type=kind), exact)
        for mode, kind in ladder
    ]
    assert errors == sorted(errors), dict(zip(ladder, errors, strict=True))


def softmax(dtype: DType, rows: int, columns: int) -> Graph:
    b = Builder()
    x = b.input((rows, columns), dtype)
    e = b.op("exponential", x)
    total = b.reduce(e, "add", (1,))
    return b.finish(b.op("divide", e, b.broadcast(total, (rows, columns), (0,))))


@pytest.mark.parametrize("level", LEVELS)
def test_mixed_precision_accumulation_keeps_fp32_around_sums(level: str) -> None:
    data = normal(64, 700).astype(ml_dtypes.bfloat16)
    wide = data.astype(np.float64)
    exact = np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
    on, off = (
        results(softmax(DType.BF16, 64, 700), [data], level, mixed_precision_accumulation=flag)
        for flag in (True, False)
    )
    once = exact.astype(ml_dtypes.bfloat16)
    assert distance(on, exact) <= 1.05 * distance(once, exact), "one rounding at the end"
    assert distance(off, exact) > 1.2 * distance(on, exact)


def accumulated(op: str, dtype: DType) -> Graph:
    """A sum in a short type, read in fp32: a product over 300 terms, or a reduction over them."""
    b = Builder()
    x, y = b.input((32, 300), dtype), b.input((300, 16), dtype)
    total = b.dot(x, y) if op == "dot" else b.reduce(b.multiply(x, x), "add", (1,))
    return b.finish(b.convert(total, DType.F32), b.convert(b.op("negate", y), DType.F32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
@pytest.mark.parametrize("op", ["dot", "reduce"])
def test_mixed_precision_accumulation_off_rounds_products_and_reductions(
    op: str, dtype: DType, level: str
) -> None:
    """On: sums and their terms stay fp32 on chip; off: every operation has its declared type. What
    overflows that type is infinite then; infinities and NaN stay what they are in both."""
    x, y = normal(32, 300).astype(dtype.numpy), normal(300, 16, seed=1).astype(dtype.numpy)
    x[3], y[:, 2] = 300.0, 300.0  # 2.7e7: beyond fp16
    if op == "dot":  # its left operand is transposed, where an infinity spoils its row
        y[7, 4], y[8, 5] = np.inf, np.nan
    else:
        x[5, 7], x[6, 8] = np.inf, np.nan
    on, off = (
        results(accumulated(op, dtype), [x, y], level, mixed_precision_accumulation=flag)
        for flag in (True, False)
    )
    wide = [a.astype(np.float64) for a in (x, y)]
    with np.errstate(all="ignore"):
        terms = (x * x).astype(dtype.numpy).astype(np.float64)
        exact = wide[0] @ wide[1] if op == "dot" else (wide[0] * wide[0]).sum(axis=1)
        rounded = wide[0] @ wide[1] if op == "dot" else terms.sum(axis=1)
        rounded = rounded.astype(np.float32).astype(dtype.numpy).astype(np.float32)
    np.testing.assert_allclose(on, exact, rtol=1e-5, atol=1e-3)
    ulp = 2.0**-8 if dtype is DType.BF16 else 2.0**-11
    np.testing.assert_allclose(off, rounded, rtol=2 * ulp, atol=1e-3)
    short = off.astype(dtype.numpy).astype(np.float32)
    np.testing.assert_array_equal(off, short)  # rounded to the declared type
    finite, large = np.isfinite(exact), (3, 2)[: exact.ndim]
    with np.errstate(over="ignore"):
        assert (on != on.astype(dtype.numpy).astype(np.float32))[finite].any()
    assert np.isinf(off[large]) == (dtype is DType.F16) and np.isfinite(on[large])


def transposing(kind: str = "dot") -> Graph:
    """A product whose left operand is stored with its contracted dim innermost."""
    b = Builder()
    x, y = b.input((128, 128)), b.input((128, 64))
    return b.finish(b.dot(x, y))


def test_saturation_prevents_the_nan_of_a_transpose() -> None:
    x, y = normal(128, 128), np.abs(normal(128, 64, seed=1)) + 0.5
    x[3, 5] = np.inf
    plain = results(transposing(), [x, y], "L0")
    assert np.isnan(plain).any(), "infinity times zero in the product with the identity"
    other_rows = np.delete(np.arange(128), 3)
    for level in LEVELS:
        safe = results(transposing(), [x, y], level, saturate_infinity=True)
        assert not np.isnan(safe).any()
        assert distance(safe[other_rows], (x @ y)[other_rows]) < 1e-6


SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.5, -2.0], np.float32)
LARGEST = np.finfo(np.float32).max


def every_pair() -> list[np.ndarray]:
    """All pairs of special values, as two [128, 64] arrays that repeat them."""
    pairs = np.stack([a.reshape(-1) for a in np.meshgrid(SPECIAL, SPECIAL)])
    return list(np.resize(pairs.T, (128 * 64, 2)).T.reshape(2, 128, 64).copy())


def within(x: np.ndarray) -> np.ndarray:
    """Infinities as the largest number; NaN stays."""
    return np.clip(x, -LARGEST, LARGEST)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
def test_saturation_prevents_the_nan_of_two_infinities(name: str, level: str) -> None:
    """inf - inf, inf / inf and inf * 0 are computed of the largest numbers, in front of any
    operation; a release from 2.13.66 leaves them."""
    b = Builder()
    graph = b.finish(b.op(name, b.input((128, 64)), b.input((128, 64))))
    x, y = every_pair()
    with np.errstate(all="ignore"):
        plain = getattr(np, name)(x, y)
        wanted = getattr(np, name)(within(x), within(y))
    np.testing.assert_array_equal(results(graph, [x, y], level), plain)
    safe = results(graph, [x, y], level, saturate_infinity=True)
    np.testing.assert_array_equal(safe, wanted)
    made = np.isnan(plain) & ~np.isnan(x) & ~np.isnan(y)
    zeros = (x == 0) & (y == 0) if name == "divide" else np.zeros(x.shape, bool)
    assert made.any() and (np.isnan(safe) & made == zeros).all()
    narrow = results(graph, [x, y], level, saturate_infinity=True, saturate_before="transposes")
    np.testing.assert_array_equal(narrow, plain)


@pytest.mark.parametrize("level", LEVELS)
def test_saturation_makes_an_even_row_of_a_softmax_of_nothing_but_minus_infinity(
    level: str,
) -> None:
    b = Builder()
    x = b.input((64, 96))
    shifted = b.op("subtract", x, b.broadcast(b.reduce(x, "max", (1,)), (64, 96), (0,)))
    e = b.op("exponential", shifted)
    graph = b.finish(b.op("divide", e, b.broadcast(b.reduce(e, "add", (1,)), (64, 96), (0,))))
    data = normal(64, 96)
    data[5], data[7, 20:] = -np.inf, -np.inf
    assert np.isnan(results(graph, [data], level)[5]).all()
    safe = results(graph, [data], level, saturate_infinity=True)
    exact = np.exp(within(data).astype(np.float64) - within(data).max(axis=1, keepdims=True))
    assert distance(safe, exact / exact.sum(axis=1, keepdims=True)) < 1e-6
    np.testing.assert_allclose(safe[5], 1 / 96, rtol=1e-6)
    assert not safe[7, 20:].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ends", [(np.inf, -np.inf), (np.inf, np.inf), (-np.inf, 1.0)])
def test_saturation_of_a_sum(ends: tuple[float, float], level: str) -> None:
    b = Builder()
    graph = b.finish(b.reduce(b.input((64, 96)), "add", (1,)))
    data = np.zeros((64, 96), np.float32)
    data[3, 4], data[3, 90] = ends
    with np.errstate(all="ignore"):
        wanted = within(data).sum(axis=1)
    np.testing.assert_array_equal(results(graph, [data], level, saturate_infinity=True), wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_stochastic_rounding_moves_a_long_sum_of_halves(level: str) -> None:
    """The documented anchor: fp16 1024 + 0.5, 2048 times; to nearest even nothing ever changes."""
    b = Builder()
    x, half = b.input((1, 128), DType.F16), b.input((1, 128), DType.F16)
    graph = b.finish(b.op("add", x, half))
    code = ProgramCode(compiled(graph), level)
    memory = CoreMemory((name, 128 * 2) for name in ("arg0", "arg1", "out0"))
    value, step, total = (memory.array(name, DType.F16) for name in ("arg0", "arg1", "out0"))
    value[:], step[:] = 1024, 0.5
    assert not list(code.run(memory))
    assert (total == 1024).all(), "to nearest even, so no number of additions changes it"
    with rounding.stochastic(seed=0):
        for _ in range(2048):
            assert not list(code.run(memory))
            value[:] = total
    sums = total.astype(np.float64)
    # 2048 draws of 0 or 1 with probability 1/2: mean 1024, deviation 22.6 per lane.
    assert abs(sums.mean() - 2048) < 10 and sums.std() < 40


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F8E4M3, DType.TF32])
def test_stochastic_rounding_is_unbiased_and_only_picks_neighbours(dtype: DType) -> None:
    x = np.full(20000, 1.0 + 0.3 * 2.0**-3, np.float32) * np.float32(1.01)
    nearest = cast(x[:1], dtype).astype(np.float64)[0]
    with rounding.stochastic(seed=1):
        drawn = rounding.narrow(x, dtype).astype(np.float64)
    values = np.unique(drawn)
    assert len(values) == 2 and nearest in values and values[0] < x[0] < values[1]
    gap = values[1] - values[0]
    assert abs(drawn.mean() - float(x[0])) < 4 * gap / np.sqrt(len(x))
    exact = cast(x, dtype).astype(np.float32)
    with rounding.stochastic(seed=2):
        assert np.array_equal(rounding.narrow(exact, dtype).astype(np.float32), exact)


def integer_scatter(kind: str) -> Graph:
    b = Builder()
    x, rows, updates = (b.input(shape, DType.I32) for shape in ((8, 4), (3, 1), (3, 4)))
    b.loc = Loc("model.py", 12)
    attrs = ScatterAttrs(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        index_vector_dim=1,
        kind=kind,
    )
    return b.finish(b.op("scatter", x, rows, updates, attrs=attrs))


@pytest.mark.parametrize("setting", ["none", "dot", "dot,pow"])
def test_integer_sums_need_permission(setting: str) -> None:
    options = CompileOptions(implicit_integer_downcast=setting)
    with pytest.raises(CompileError, match=r"model.py:12: error\[NCC_EVRF060\]"):
        check_integers(integer_scatter("add"), options, "v2")
    check_integers(integer_scatter("replace"), options, "v2")
    check_integers(product(), options, "v2")


@pytest.mark.parametrize("setting", ["default", "all", "scatter", "dot,scatter"])
def test_permission_is_the_default_or_named(setting: str) -> None:
    graph = integer_scatter("add")
    options = CompileOptions(implicit_integer_downcast=setting)
    assert check_integers(graph, options, "v2") is graph


def test_fp8_formats_follow_the_generation() -> None:
    b = Builder()
    b.loc = Loc("model.py", 3)
    graph = b.finish(b.convert(b.input((4, 4)), DType.F8E4M3FN))
    with pytest.raises(CompileError, match=r"model.py:3: error\[NCC_EVRF051\]"):
        check_formats(graph, DEFAULTS, "v2")
    unsafe = CompileOptions(experimental_unsafe_fp8e4m3fn_as_fp8e4m3=True)
    assert check_formats(graph, unsafe, "v2") is check_formats(graph, DEFAULTS, "v4")
    b = Builder()
    ieee = b.finish(b.convert(b.input((4, 4)), DType.F8E4M3))
    with pytest.raises(CompileError, match="NCC_EVRF052"):
        check_formats(ieee, DEFAULTS, "v5")
    assert check_formats(ieee, DEFAULTS, "v2") is ieee


def test_integer_products_are_accepted_on_v2_only() -> None:
    check = CompileOptions(implicit_integer_downcast="none")
    graph = product(DType.I32)
    assert check_integers(graph, check, "v2") is graph
    with pytest.raises(CompileError, match="NCC_EVRF035"):
        check_integers(graph, check, "v3")
