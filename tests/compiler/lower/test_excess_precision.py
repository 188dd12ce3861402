"""Short floats are rounded where they are stored or where the model asks for it, nowhere else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.driver import compile_graph
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import ConvertAttrs
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.lower.excess_precision import SMALL_BYTES
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.program import StepProgram
from shardwright.sim_cluster.values.run_single import run_single
from tests.support.kernel_reference import lower_function
from tests.support.model_run import compile_function

TARGET = "trn1n.32xlarge"
LEVELS = ("L0", "L1")
BF16 = ml_dtypes.bfloat16
OFF = CompileOptions(mixed_precision_accumulation=False)


def normal(*shape: int, seed: int = 0, dtype: Any = BF16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


def results(
    graph: Graph, arrays: list[np.ndarray], level: str, options: CompileOptions
) -> list[np.ndarray]:
    inputs = tuple(f"arg{i}" for i in range(len(graph.inputs)))
    outputs = tuple(f"out{i}" for i in range(len(graph.outputs)))
    step = StepProgram(name="main", graph=graph, inputs=inputs, outputs=outputs)
    program = compile_graph(step, TARGET, options)
    found = run_single(program, dict(zip(inputs, arrays, strict=True)), level)
    return [found[name] for name in outputs]


def compute(graph: Graph, options: CompileOptions = DEFAULTS) -> list[KernelProgram]:
    """The compute kernels of a graph, every legal merge taken."""
    kernels = lower_function(graph, options=options).kernels
    return [k for k in kernels if k.kind == "compute"]


def scratch_types(graph: Graph, options: CompileOptions = DEFAULTS) -> list[DType]:
    return [t.dtype for t in lower_function(graph, options=options).tensors if t.kind == "scratch"]


def chain(rows: int = 128) -> Graph:
    """(x / y) / x and x / y."""
    b = Builder()
    x, y = b.input((rows, 64), DType.BF16), b.input((rows, 64), DType.BF16)
    ratio = b.op("divide", x, y)
    return b.finish(b.op("divide", ratio, x), ratio)


@pytest.mark.parametrize("level", LEVELS)
def test_a_chain_on_chip_rounds_once(level: str) -> None:
    x, y = normal(128, 64), normal(128, 64, seed=1)
    ratio = x.astype(np.float32) / y.astype(np.float32)
    once, stored = results(chain(), [x, y], level, CompileOptions())
    np.testing.assert_array_equal(once, (ratio / x.astype(np.float32)).astype(BF16))
    np.testing.assert_array_equal(stored, ratio.astype(BF16))
    every, _ = results(chain(), [x, y], level, OFF)
    short = ratio.astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(every, (short / x.astype(np.float32)).astype(BF16))
    assert (every != once).any(), "the option has to be visible"


@pytest.mark.parametrize("level", LEVELS)
def test_casts_of_the_model_fold_on_chip_too(level: str) -> None:
    """fp32 -> bf16 -> fp32 inside of a kernel is no rounding, as in XLA's fusions."""
    b = Builder()
    x = b.input((128, 64))
    short = b.convert(x, DType.BF16)
    graph = b.finish(b.op("exponential", b.convert(short, DType.F32)))
    data = normal(128, 64, dtype=np.float32)
    (kept,) = results(graph, [data], level, CompileOptions())
    np.testing.assert_allclose(kept, np.exp(data.astype(np.float64)), rtol=1e-6)
    (rounded,) = results(graph, [data], level, OFF)
    np.testing.assert_allclose(rounded, np.exp(data.astype(BF16).astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [(8, 7), (5, 10), (4, 3)])
def test_a_rounding_that_the_model_asks_for_stays(bits: tuple[int, int], level: str) -> None:
    """`reduce_precision` is kept where XLA keeps it, also between operations on chip."""

    def fn(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(x * 3, *bits) * 5

    data = normal(128, 64, dtype=np.float32)
    (got,) = compile_function(fn, (data,)).run(level)
    np.testing.assert_array_equal(got, np.asarray(jax.jit(fn)(data)))


def test_a_rounding_that_the_model_asks_for_is_printed() -> None:
    b = Builder()
    x = b.input((4,))
    asked = b.op("convert", x, attrs=ConvertAttrs(DType.BF16, rounds=True))
    text = to_stablehlo(b.finish(b.convert(asked, DType.F32)))
    assert "reduce_precision" in text and "mantissa_bits = 7" in text


@pytest.mark.parametrize("level", LEVELS)
def test_integers_and_bits_are_made_of_the_declared_type(level: str) -> None:
    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = 1000 / x
        return y.astype(jnp.int32), jax.lax.bitcast_convert_type(y, jnp.uint16), y / x

    x = normal(128, 64)
    whole, bits, again = compile_function(fn, (x,)).run(level)
    wide = x.astype(np.float32)
    ratio = np.float32(1000) / wide
    np.testing.assert_array_equal(bits, ratio.astype(BF16).view(np.uint16))
    np.testing.assert_array_equal(whole, ratio.astype(BF16).astype(np.int32))
    np.testing.assert_array_equal(again, (ratio / wide).astype(BF16))


@pytest.mark.parametrize("level", LEVELS)
def test_contractions_get_operands_of_the_declared_type(level: str) -> None:
    b = Builder()
    x, w = b.input((128, 128), DType.BF16), b.input((128, 32), DType.BF16)
    y = b.op("divide", b.full((128, 128), 3.0, DType.BF16), x)
    graph = b.finish(b.dot(y, w, dtype=DType.F32), b.op("divide", y, x))
    x_, w_ = normal(128, 128), normal(128, 32, seed=1)
    product, _ = results(graph, [x_, w_], level, CompileOptions())
    short = (np.float32(3) / x_.astype(np.float32)).astype(BF16).astype(np.float64)
    wanted = short @ w_.astype(np.float64)
    assert np.linalg.norm(product - wanted) <= 1e-6 * np.linalg.norm(wanted)
    types = {k.nodes[i].dtype for k in compute(graph) for n in k.nodes for i in n.inputs
             if n.op == "contract"}  # fmt: skip
    assert types == {DType.BF16}


def normalised_product(rows: int, columns: int, dtype: DType = DType.BF16) -> Graph:
    """A product, its sums over rows, and the product divided by them, in fp32 as in batch norm.

    Sums over so many rows need a kernel of their own: the product crosses memory.
    """
    b = Builder()
    x, w = b.input((rows, 64), DType.BF16), b.input((64, columns), DType.BF16)
    y = b.dot(x, w, dtype=dtype)
    y = b.convert(y, DType.F32) if dtype is DType.BF16 else y
    sums = b.op("add", b.reduce(y, "add", (0,)), b.reduce(b.multiply(y, y), "add", (0,)))
    return b.finish(b.op("divide", y, b.broadcast(sums, (rows, columns), (1,))))


def test_what_is_stored_in_fp32_anyway_is_not_rounded_before() -> None:
    """The fp32 value is stored once, by the product: the same scratch as of a product in fp32."""
    shape = (40000, 48)
    kept, plain = (scratch_types(normalised_product(*shape, t)) for t in (DType.BF16, DType.F32))
    assert DType.F32 in kept and DType.BF16 not in kept
    assert kept == plain
    rounded = compute(normalised_product(*shape), OFF)
    assert any(n.op == "contract" and n.dtype is DType.BF16 for k in rounded for n in k.nodes)


def test_only_small_values_cross_memory_in_fp32() -> None:
    rows = 12
    columns = SMALL_BYTES // (4 * rows)
    assert scratch_types(normalised_product(rows, columns)) == [DType.F32]
    assert scratch_types(normalised_product(rows, columns + 1)) == [DType.BF16]
    assert scratch_types(normalised_product(rows, columns), OFF) == [DType.BF16]


def product_of_tensors(rows: int, reader: str) -> Graph:
    """exp(x) * y in bf16, as a result or read by `reader`."""
    b = Builder()
    x, y = b.input((rows, 64), DType.BF16), b.input((rows, 64), DType.BF16)
    product = b.multiply(b.op("exponential", x), y)
    if reader == "sum":
        return b.finish(b.reduce(product, "add", (1,)))
    return b.finish(b.op(reader, product, y) if reader else product)


@pytest.mark.parametrize(
    ("rows", "reader", "made"),
    [
        (65, "", DType.BF16),
        (64, "", DType.F32),  # takes the least time in either mode
        (65, "sum", DType.F32),
        (65, "divide", DType.F32),  # the product itself is fp32: no bf16 mode to lose
    ],
)
def test_the_bf16_mode_of_vector_is_worth_a_rounding(rows: int, reader: str, made: DType) -> None:
    """Two bf16 tensors of more than 4096 elements multiply at twice the rate."""
    (kernel,) = compute(product_of_tensors(rows, reader))
    assert next(n.dtype for n in kernel.nodes if n.op == "exponential") is made


def test_casting_everything_keeps_every_rounding() -> None:
    """`--auto-cast all` asks for the short type between operations."""
    all_short = CompileOptions(auto_cast="all")
    assert CompileOptions().keeps_fp32 and not all_short.keeps_fp32
    assert all(n.dtype is not DType.F32 for k in compute(chain(), all_short) for n in k.nodes)
    assert any(n.dtype is DType.F32 for k in compute(chain()) for n in k.nodes)
