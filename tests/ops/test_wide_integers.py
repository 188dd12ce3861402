"""64-bit integers: 32 bits inside of a program, 64 at its borders, never a silent constant; 64
bits inside too where a machine has them and is asked for them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.isa.costs import instr_interval_ps
from shardwright.compiler.isa.program import AccessPattern, Affine, Engine, Instr, Space, Tile
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from tests.support.compiled import link, run_levels

RNG = np.random.default_rng(3)
FUNCTION = """
func.func @main(%x: tensor<5x7xi64>, %t: tensor<50x8xf32>, %i: tensor<i64>)
  -> (tensor<5x7xi64>, tensor<5x7xf32>, tensor<5x7x8xf32>, tensor<7x5xi64>, tensor<1x7xi64>,
      tensor<5x7xi64>, tensor<5xi64>, tensor<5x7xui64>) {
  %c = stablehlo.constant dense<-3> : tensor<5x7xi64>
  %y = stablehlo.multiply %x, %c : tensor<5x7xi64>
  %z = stablehlo.convert %y : (tensor<5x7xi64>) -> tensor<5x7xf32>
  %g = "stablehlo.gather"(%t, %x) {
    dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0],
      start_index_map = [0], index_vector_dim = 2>,
    slice_sizes = array<i64: 1, 8>, indices_are_sorted = false
  } : (tensor<50x8xf32>, tensor<5x7xi64>) -> tensor<5x7x8xf32>
  %tr = stablehlo.transpose %x, dims = [1, 0] : (tensor<5x7xi64>) -> tensor<7x5xi64>
  %z0 = stablehlo.constant dense<0> : tensor<i64>
  %ds = stablehlo.dynamic_slice %y, %i, %z0, sizes = [1, 7]
    : (tensor<5x7xi64>, tensor<i64>, tensor<i64>) -> tensor<1x7xi64>
  %low = stablehlo.constant dense<-9223372036854775808> : tensor<i64>
  %m = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [1]
    : (tensor<5x7xi64>, tensor<i64>) -> tensor<5xi64>
  %n = stablehlo.iota dim = 1 : tensor<5x7xui64>
  %u = stablehlo.add %n, %n : tensor<5x7xui64>
  return %y, %z, %g, %tr, %ds, %x, %m, %u : tensor<5x7xi64>, tensor<5x7xf32>,
    tensor<5x7x8xf32>, tensor<7x5xi64>, tensor<1x7xi64>, tensor<5x7xi64>, tensor<5xi64>,
    tensor<5x7xui64>
}"""
CONSTANT = """
func.func @main(%x: tensor<3x{0}>) -> tensor<3x{0}> {{
  %c = stablehlo.constant dense<[1, {1}, 3]> : tensor<3x{0}>
  %y = stablehlo.add %x, %c : tensor<3x{0}>
  return %y : tensor<3x{0}>
}}"""


def test_values_and_types_at_the_borders() -> None:
    graph = import_module(FUNCTION)
    x = RNG.integers(0, 50, (5, 7))
    inputs = [x, RNG.normal(size=(50, 8)).astype(np.float32), np.asarray(3)]
    wanted = evaluate(graph, inputs)
    for found in run_levels(graph, inputs):
        for have, want in zip(found, wanted, strict=True):
            assert have.dtype == want.dtype
            np.testing.assert_array_equal(have, want)


def test_high_bits_are_dropped_by_arithmetic_and_kept_by_copies() -> None:
    graph = import_module(FUNCTION)
    x = RNG.integers(0, 50, (5, 7)) + (1 << 40)
    inputs = [x, np.zeros((50, 8), np.float32), np.asarray(0)]
    for found in run_levels(graph, inputs):
        np.testing.assert_array_equal(found[0], (x.astype(np.int32) * np.int32(-3)))
        np.testing.assert_array_equal(found[5], x)


@pytest.mark.parametrize(("dtype", "number"), [("ui64", 2**32), ("i64", 2**31), ("i64", -(2**40))])
def test_constants_that_32_bits_cannot_hold(dtype: str, number: int) -> None:
    with pytest.raises(CompileError) as caught:
        link(import_module(CONSTANT.format(dtype, number)))
    assert caught.value.code == "NCC_ESFH002"
    assert str(number) in str(caught.value)


@pytest.mark.parametrize(("dtype", "number"), [("ui64", 2**32 - 1), ("i64", -(2**31))])
def test_constants_that_just_fit(dtype: str, number: int) -> None:
    graph = import_module(CONSTANT.format(dtype, number))
    x = np.zeros(3, np.uint64 if dtype == "ui64" else np.int64)
    (want,) = evaluate(graph, [x])
    for (have,) in run_levels(graph, [x]):
        np.testing.assert_array_equal(have, want)


NATIVE, TRN2 = CompileOptions(optlevel=1, native_int64="enabled"), "trn2.48xlarge"
TYPES = {"i64": np.int64, "ui64": np.uint64}
ARITHMETIC = """
func.func @main(%a: T, %b: T, %s: T, %i: tensor<4x1xE>) -> (T, T, T, T, T, T, T, T, P, P, U, V, W,
    T, G, Q) {
  %0 = stablehlo.add %a, %b : T
  %1 = stablehlo.multiply %a, %b : T
  %2 = stablehlo.divide %a, %b : T
  %3 = stablehlo.remainder %a, %b : T
  %4 = stablehlo.shift_left %a, %s : T
  %5 = stablehlo.shift_right_logical %a, %s : T
  %6 = stablehlo.maximum %a, %b : T
  %7 = stablehlo.popcnt %a : T
  %8 = stablehlo.compare LT, %a, %b : (T, T) -> P
  %9 = stablehlo.compare EQ, %a, %b : (T, T) -> P
  %zero = stablehlo.constant dense<0> : tensor<E>
  %low = stablehlo.constant dense<LOWEST> : tensor<E>
  %10 = stablehlo.reduce(%a init: %zero) applies stablehlo.add across dimensions = [0]
    : (T, tensor<E>) -> U
  %11 = stablehlo.reduce(%a init: %low) applies stablehlo.maximum across dimensions = [1]
    : (T, tensor<E>) -> V
  %12 = stablehlo.convert %a : (T) -> W
  %c = stablehlo.constant dense<1099511627783> : T
  %13 = stablehlo.xor %a, %c : T
  %14 = "stablehlo.gather"(%0, %i) {dimension_numbers = #stablehlo.gather<offset_dims = [1],
    collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1, 7>, indices_are_sorted = false} : (T, tensor<4x1xE>) -> G
  %15 = stablehlo.bitcast_convert %0 : (T) -> Q
  return %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 : T, T, T, T, T, T,
    T, T, P, P, U, V, W, T, G, Q
}"""
SORT = """
func.func @main(%a: T) -> (T, tensor<5x2xE>) {
  %0 = "stablehlo.sort"(%a) ({
    ^bb0(%x: tensor<E>, %y: tensor<E>):
      %p = stablehlo.compare GT, %x, %y : (tensor<E>, tensor<E>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
  }) {dimension = 1 : i64} : (T) -> T
  %1 = "stablehlo.sort"(%a) ({
    ^bb0(%x: tensor<E>, %y: tensor<E>):
      %p = stablehlo.compare LT, %x, %y : (tensor<E>, tensor<E>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
  }) {dimension = 1 : i64} : (T) -> T
  %2 = stablehlo.slice %1 [0:5, 0:2] : (T) -> tensor<5x2xE>
  return %0, %2 : T, tensor<5x2xE>
}"""


def of_type(text: str, dtype: str) -> str:
    """A function with its letters for types filled in."""
    shapes = {"T": "5x7", "U": "7", "V": "5", "G": "4x7"}
    for letter, shape in shapes.items():
        text = re.sub(rf"\b{letter}\b", f"tensor<{shape}x{dtype}>", text)
    for letter, type in (("P", "5x7xi1"), ("W", "5x7xf32"), ("Q", "5x7x2xui32")):
        text = re.sub(rf"\b{letter}\b", f"tensor<{type}>", text)
    text = text.replace("LOWEST", str(np.iinfo(TYPES[dtype]).min))
    return re.sub(r"(<|x)E\b", rf"\g<1>{dtype}", text)


def wide_values(dtype: str, *shape: int) -> np.ndarray:
    """Of all sizes: the ends of the type, both sides of 2^31 and 2^32, and anything between."""
    kind = TYPES[dtype]
    info = np.iinfo(kind)
    values = RNG.integers(info.min, info.max, shape, kind)
    ends = [info.min, info.max, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 1]
    values.flat[: len(ends)] = np.array(ends, kind)
    return values


@pytest.mark.parametrize("dtype", TYPES)
def test_64_bits_where_a_machine_is_asked_for_them(dtype: str) -> None:
    graph = import_module(of_type(ARITHMETIC, dtype))
    a, kind = wide_values(dtype, 5, 7), TYPES[dtype]
    b = wide_values(dtype, 5, 7)[::-1, ::-1].copy() // kind(2**20)
    b[b == 0] = 3
    inputs = [a, b, np.arange(35).reshape(5, 7).astype(kind), np.array([[1], [4], [0], [3]], kind)]
    wanted = evaluate(graph, inputs)
    for found in run_levels(graph, inputs, options=NATIVE, target=TRN2):
        for number, (have, want) in enumerate(zip(found, wanted, strict=True)):
            assert have.dtype == want.dtype
            np.testing.assert_array_equal(have, want, err_msg=f"result {number}")


@pytest.mark.parametrize("dtype", TYPES)
def test_64_bits_are_sorted_by_all_of_them(dtype: str) -> None:
    a = wide_values(dtype, 5, 7)
    for whole, first in run_levels(
        import_module(of_type(SORT, dtype)), [a], options=NATIVE, target=TRN2
    ):
        np.testing.assert_array_equal(whole, np.sort(a, axis=1)[:, ::-1])
        np.testing.assert_array_equal(first, np.sort(a, axis=1)[:, :2])


def test_a_machine_without_them_has_the_low_32_bits_of_arithmetic() -> None:
    text = CONSTANT.format("i64", 5)
    x = np.array([2**40 + 1, 2, 3])
    for target, wanted in ((TRN2, [2**40 + 2, 7, 6]), ("trn1.2xlarge", [2, 7, 6])):
        for (have,) in run_levels(import_module(text), [x], options=NATIVE, target=target):
            np.testing.assert_array_equal(have, wanted)


def test_64_bits_take_a_quarter_longer_on_an_engine() -> None:
    types = DType.I32, DType.I64
    tiles = {dtype: [Tile("t", Space.SBUF, 128, 512, dtype)] for dtype in types}
    pattern = AccessPattern(Space.SBUF, 0, Affine(0), ((1, 128), (1, 512)))
    add = Instr("tensor_tensor", Engine.VECTOR, pattern, (pattern, pattern), {"op": "add"})
    core = load_target(TRN2).core
    narrow, wide = (instr_interval_ps(add, each, [], core) for each in tiles.values())
    assert wide == pytest.approx(1.25 * narrow)  # documented: 20 to 30 %
