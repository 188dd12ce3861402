"""64-bit integers: 32 bits inside of a program, 64 at its borders, never a silent constant."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
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
