"""64-bit integers: what is known to fit 32 bits is exact, what is not is said or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import LoopAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.integers import check_integers, downcasts, wide_operations
from shardwright.compiler.passes.pipeline import DCE
from shardwright.compiler.passes.ranges import integer_ranges
from shardwright.compiler.rewriting.driver import run
from tests.support import xla
from tests.support.compiled import run_levels
from tests.support.model_files import compile_line

ENABLED = CompileOptions(native_int64="enabled")
SHAPE = (4, 5)
BINARY = ("add", "subtract", "multiply", "maximum", "minimum", "remainder", "and", "or", "xor")
SHIFTS = ("shift_left", "shift_right_logical")
UNARY = ("negate", "abs", "sign")


def graph_of(fn: Callable[..., Any], *arguments: np.ndarray) -> tuple[Graph, list[np.ndarray]]:
    """(graph, results) of a function with 64-bit integers."""
    with jax.enable_x64(True):
        traced = jax.jit(fn).trace(*arguments)
        graph = import_module(artifact_of(traced))
        return graph, [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*arguments))]


def bounded(x: jax.Array) -> tuple[jax.Array, ...]:
    """64-bit arithmetic on what comes from 16-bit inputs and counts."""
    wide = x.astype(jnp.int64)
    rows = jnp.arange(x.shape[0], dtype=jnp.int64)[:, None]
    total = jnp.sum(wide, axis=1)
    return wide * rows - 7, total * total.shape[0], jnp.where(wide > rows, wide, -rows)


def squared(x: jax.Array) -> jax.Array:
    return x * x + 1


def test_values_that_fit_are_exact_and_nothing_is_said() -> None:
    x = np.random.default_rng(0).integers(-(2**15), 2**15, (6, 9)).astype(np.int16)
    graph, wanted = graph_of(bounded, x)
    assert wide_operations(graph) == [] and downcasts(graph) == []
    check_integers(graph, ENABLED, "v3")
    for found in run_levels(graph, [x]):
        for have, want in zip(found, wanted, strict=True):
            assert have.dtype == want.dtype == np.int64
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_inputs_that_could_be_anything_are_warned_about(dtype: type) -> None:
    graph, _ = graph_of(squared, np.zeros(SHAPE, dtype))
    (finding,) = downcasts(graph)
    assert (finding.code, finding.severity) == ("SW_INT64", "warning")
    assert "multiply" in finding.message and "1 more operation" in finding.message
    assert finding.loc is not None and finding.loc.file.endswith("test_integers.py")


@pytest.mark.parametrize(
    ("given", "result"), [("i8", "i8"), ("i8", "ui32"), ("ui16", "ui16"), ("ui8", "i8")]
)
def test_sums_of_products_wrap_around(given: str, result: str) -> None:
    """As XLA's do, while fp32 holds them: negative sums of unsigned results too."""
    x, y, z = f"tensor<3x2x{given}>", f"tensor<2x4x{given}>", f"tensor<3x4x{result}>"
    text = f"""func.func @main(%x: {x}, %y: {y}) -> {z} {{
      %z = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : ({x}, {y}) -> {z}
      return %z : {z}
    }}"""
    graph = import_module(text)
    dtype = graph.inputs[0].type.dtype.numpy
    low, high = max(np.iinfo(dtype).min, -2000), min(np.iinfo(dtype).max, 2000)
    rng = np.random.default_rng(0)
    inputs = [rng.integers(low, high, v.type.shape).astype(dtype) for v in graph.inputs]
    whole = inputs[0].astype(np.int64) @ inputs[1].astype(np.int64)
    wanted = whole.astype(graph.outputs[0].type.dtype.numpy)
    assert (wanted != whole).any(), "nothing wraps"
    np.testing.assert_array_equal(xla.run(text, inputs)[0], wanted)
    for (have,) in run_levels(graph, inputs):
        np.testing.assert_array_equal(have, wanted)


@pytest.mark.parametrize(
    ("dtype", "depth", "rounded"), [("i8", 1024, False), ("i8", 1025, True), ("i32", 1, True)]
)
def test_sums_that_fp32_may_round_are_warned_about(dtype: str, depth: int, rounded: bool) -> None:
    """1,024 products of -128 by -128 are 2^24."""
    text = f"""func.func @main(%x: tensor<3x{depth}x{dtype}>) -> tensor<3x3xi32> {{
      %z = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1]
        : (tensor<3x{depth}x{dtype}>, tensor<3x{depth}x{dtype}>) -> tensor<3x3xi32>
      return %z : tensor<3x3xi32>
    }}"""
    found = downcasts(import_module(text))
    assert [f.code for f in found] == ["NCC_EVRF035"] * rounded
    assert all("exact up to 2^24" in f.message and f.severity == "warning" for f in found)


def test_what_is_computed_in_64_bits_is_not_warned_about() -> None:
    graph, _ = graph_of(squared, np.zeros(SHAPE, np.int64))
    assert check_integers(graph, ENABLED, "v3") is graph
    assert downcasts(graph, ENABLED, "v3") == []
    for options, generation in ((ENABLED, "v2"), (CompileOptions(), "v3")):
        assert [found.code for found in downcasts(graph, options, generation)] == ["SW_INT64"]


def test_low_bits_may_be_asked_for() -> None:
    """A conversion to a shorter integer takes them from memory."""
    x = np.random.default_rng(0).integers(-(2**62), 2**62, SHAPE)
    graph, wanted = graph_of(lambda x: x.astype(jnp.int32) + 1, x)
    assert wide_operations(graph) == []
    for (have,) in run_levels(graph, [x]):
        np.testing.assert_array_equal(have, wanted[0])


DRAWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "uniform": lambda key: jax.random.uniform(key, (3, 5)),
    "permutation": lambda key: jax.random.permutation(key, 8),
    "of a split key": lambda key: jax.random.normal(jax.random.split(key, 4)[2], (3,)),
    "of a folded key": lambda key: jax.random.bits(jax.random.fold_in(key, 4), (3,)),
}


@pytest.mark.parametrize("is_partitionable", [True, False])
@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_jax_are_none_of_the_users_integers(
    name: str, generator: str, is_partitionable: bool
) -> None:
    """Counters and keys of a generator are packed into 64 bits, and read in halves."""
    with jax.threefry_partitionable(is_partitionable):
        key = jax.random.key(0, impl=generator)
        graph = run(import_module(artifact_of(jax.jit(DRAWS[name]).trace(key))), (DCE,))
    assert downcasts(graph) == []
    assert check_integers(graph, ENABLED, "v3") is graph


def test_high_words_of_counts_are_zero() -> None:
    """What jax's counters rely on: a shift by all 32 bits that are there leaves nothing."""
    x = np.arange(1, 6, dtype=np.uint16)
    graph, wanted = graph_of(lambda x: x.astype(jnp.uint64) << 20 >> 32, x)
    assert downcasts(graph)  # 36 bits, of which the upper ones are lost
    graph, wanted = graph_of(lambda x: (x.astype(jnp.uint64) & 1023) << 8 >> 32 | 5, x)
    assert downcasts(graph) == []
    for (have,) in run_levels(graph, [x]):
        np.testing.assert_array_equal(have, wanted[0])


@pytest.mark.parametrize(("start", "fits"), [(0, True), (2**40, False)])
def test_counters_of_loops_are_bounded(start: int, fits: bool) -> None:
    inner = Builder()
    i, total = inner.input((), DType.I64), inner.input((), DType.I64)
    one = inner.op("multiply", i, i)
    body = inner.finish(i, one)
    b = Builder()
    zero = b.op("convert", b.full((), 0, DType.I32), attrs=_to(DType.I64))
    first = b.op("add", zero, b.full((), start, DType.I64))
    results = tuple(Value(v.type) for v in (zero, first))
    loop = Op("loop", (zero, first), results, LoopAttrs(trip=1000, induction=0), (body,), Loc())
    graph = Graph((), (*b.finish(first).ops, loop), results)
    ranges = integer_ranges(graph)
    assert ranges[i] == (0, 999) and ranges[one] == (0, 999**2) and total not in ranges
    assert (not [op for op in wide_operations(graph) if op.name == "add"]) is fits


def _to(dtype: DType) -> Any:
    from shardwright.compiler.ir.ops import ConvertAttrs

    return ConvertAttrs(dtype)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_ranges_hold_what_the_reference_computes(data: st.DataObject) -> None:
    """Random chains of 64-bit arithmetic on 8-bit inputs stay inside of their ranges."""
    b = Builder()
    inputs = [b.input(SHAPE, DType.I8) for _ in range(2)]
    values = [b.convert(x, DType.I64) for x in inputs]
    for _ in range(data.draw(st.integers(1, 8))):
        name = data.draw(st.sampled_from((*BINARY, *UNARY, *SHIFTS)))
        operands = [data.draw(st.sampled_from(values)) for _ in range(2 if name in BINARY else 1)]
        if name in SHIFTS:
            operands.append(b.full(SHAPE, data.draw(st.integers(0, 70)), DType.I64))
        values.append(b.op(name, *operands))
    graph = b.finish(*values)
    ranges = integer_ranges(graph)
    arrays = [
        np.random.default_rng(data.draw(st.integers(0, 99))).integers(-128, 128, SHAPE, np.int8)
        for _ in inputs
    ]
    for value, array in zip(graph.outputs, evaluate(graph, arrays), strict=True):
        if value in ranges:
            low, high = ranges[value]
            assert low <= int(array.min()) and int(array.max()) <= high


def test_the_command_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = """func.func @main(%x: tensor<4xi64>) -> tensor<4xi64> {
      %y = stablehlo.multiply %x, %x : tensor<4xi64>
      return %y : tensor<4xi64>
    }"""
    (tmp_path / "m.mlir").write_text(module)
    assert compile_line("shardwright compile m.mlir --target trn1") == 0
    assert "warning[SW_INT64]: multiply of tensor<4xi64>" in capsys.readouterr().err
    assert compile_line("shardwright compile m.mlir --target trn2 --native-int64 enabled") == 0
    assert "SW_INT64" not in capsys.readouterr().err
