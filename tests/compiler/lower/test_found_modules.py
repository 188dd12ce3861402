"""Modules that random testing found wrong or refused, cut down; each against XLA at both levels."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.frontend.stablehlo import import_module
from tests.support import xla
from tests.support.compiled import run_levels

NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i32": np.int32, "i1": np.bool_}
FOUND = {
    "a constant transposed and reshaped across its dims": """
      (%a: tensor<2xf32>) -> tensor<62x5xi32> {
        %0 = stablehlo.iota dim = 2 : tensor<2x31x5xi32>
        %1 = stablehlo.transpose %0, dims = [0, 2, 1]
          : (tensor<2x31x5xi32>) -> tensor<2x5x31xi32>
        %2 = stablehlo.reshape %1 : (tensor<2x5x31xi32>) -> tensor<62x5xi32>
        %3 = stablehlo.multiply %2, %2 : tensor<62x5xi32>
        return %3 : tensor<62x5xi32> }""",
    "rows gathered from a reversed dim": """
      (%a: tensor<13x3x5xi1>, %i: tensor<2x1xi32>) -> tensor<13x2x5xi1> {
        %0 = stablehlo.reverse %a, dims = [1] : tensor<13x3x5xi1>
        %1 = "stablehlo.gather"(%0, %i) <{dimension_numbers = #stablehlo.gather<offset_dims =
          [0, 2], collapsed_slice_dims = [1], start_index_map = [1], index_vector_dim = 1>,
          slice_sizes = array<i64: 13, 1, 5>, indices_are_sorted = false}>
          : (tensor<13x3x5xi1>, tensor<2x1xi32>) -> tensor<13x2x5xi1>
        return %1 : tensor<13x2x5xi1> }""",
    "a scatter whose updates are its own operand": """
      (%a: tensor<5x4xf32>, %i: tensor<5x1xi32>) -> tensor<5x4xf32> {
        %0 = stablehlo.add %a, %a : tensor<5x4xf32>
        %1 = "stablehlo.scatter"(%0, %i, %0) <{scatter_dimension_numbers = #stablehlo.scatter<
          update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
          index_vector_dim = 1>}> ({ ^bb0(%x: tensor<f32>, %y: tensor<f32>):
            %2 = stablehlo.maximum %x, %y : tensor<f32>
            stablehlo.return %2 : tensor<f32> })
          : (tensor<5x4xf32>, tensor<5x1xi32>, tensor<5x4xf32>) -> tensor<5x4xf32>
        return %1 : tensor<5x4xf32> }""",
    "a sum over a dim along which neither operand moves": """
      (%a: tensor<2xf32>) -> tensor<f32> {
        %0 = stablehlo.iota dim = 1 : tensor<2x127xbf16>
        %1 = stablehlo.broadcast_in_dim %0, dims = [0, 1]
          : (tensor<2x127xbf16>) -> tensor<2x127x64xbf16>
        %2 = stablehlo.iota dim = 2 : tensor<2x64x127xbf16>
        %m = stablehlo.constant dense<8.0> : tensor<bf16>
        %3 = stablehlo.clamp %m, %2, %m : (tensor<bf16>, tensor<2x64x127xbf16>, tensor<bf16>)
          -> tensor<2x64x127xbf16>
        %4 = stablehlo.dot_general %1, %3, contracting_dims = [1, 0, 2] x [2, 0, 1]
          : (tensor<2x127x64xbf16>, tensor<2x64x127xbf16>) -> tensor<f32>
        return %4 : tensor<f32> }""",
    "a product repeated over a new dim": """
      (%a: tensor<4x5x5xbf16>, %b: tensor<13x5x4x5xbf16>) -> tensor<31x5x13xf32> {
        %0 = stablehlo.dot_general %a, %b, batching_dims = [2] x [3],
          contracting_dims = [1, 0] x [1, 2]
          : (tensor<4x5x5xbf16>, tensor<13x5x4x5xbf16>) -> tensor<5x13xf32>
        %1 = stablehlo.broadcast_in_dim %0, dims = [1, 2]
          : (tensor<5x13xf32>) -> tensor<31x5x13xf32>
        return %1 : tensor<31x5x13xf32> }""",
    "a product with an operand that repeats along a dim that stays": """
      (%a: tensor<2x7x1xf32>, %b: tensor<7xf32>) -> tensor<2x31xf32> {
        %0 = stablehlo.broadcast_in_dim %a, dims = [0, 1, 2]
          : (tensor<2x7x1xf32>) -> tensor<2x7x31xf32>
        %1 = stablehlo.dot_general %0, %b, contracting_dims = [1] x [0]
          : (tensor<2x7x31xf32>, tensor<7xf32>) -> tensor<2x31xf32>
        return %1 : tensor<2x31xf32> }""",
    "rows without an update of a scatter that takes the smallest": """
      (%a: tensor<257xbf16>, %i: tensor<7x1xi32>, %u: tensor<7xbf16>) -> tensor<bf16> {
        %o = stablehlo.constant dense<1.0> : tensor<bf16>
        %m = stablehlo.constant dense<-1.0> : tensor<bf16>
        %0 = "stablehlo.scatter"(%a, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<
          update_window_dims = [], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
          index_vector_dim = 1>}> ({ ^bb0(%x: tensor<bf16>, %y: tensor<bf16>):
            %4 = stablehlo.minimum %x, %y : tensor<bf16>
            stablehlo.return %4 : tensor<bf16> })
          : (tensor<257xbf16>, tensor<7x1xi32>, tensor<7xbf16>) -> tensor<257xbf16>
        %1 = stablehlo.clamp %m, %0, %o
          : (tensor<bf16>, tensor<257xbf16>, tensor<bf16>) -> tensor<257xbf16>
        %2 = stablehlo.reduce(%1 init: %o) applies stablehlo.multiply across dimensions = [0]
          : (tensor<257xbf16>, tensor<bf16>) -> tensor<bf16>
        return %2 : tensor<bf16> }""",
}


def inputs_of(text: str) -> list[np.ndarray]:
    """Small whole numbers for the arguments of a signature; indices stay below the first dim."""
    rng = np.random.default_rng(0)
    signature = text.partition("->")[0]
    found = []
    for shape, dtype in re.findall(r"tensor<((?:\d+x)*)(\w+)>", signature):
        sizes = [int(n) for n in shape.split("x") if n]
        found.append(rng.integers(0, 3, sizes).astype(NUMPY[dtype]))
    return found


@pytest.mark.parametrize("name", FOUND)
def test_module(name: str) -> None:
    text = f"func.func public @main{FOUND[name].strip()}"
    inputs = inputs_of(text)
    (wanted,) = xla.run(text, inputs)
    for (given,) in run_levels(import_module(text), inputs):
        np.testing.assert_array_equal(given, wanted)
