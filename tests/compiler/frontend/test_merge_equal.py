"""Equal ops of a module are merged before import: constants and repetitions once, barriers never,
and nothing that a loop makes itself becomes a carry.
"""

from __future__ import annotations

import numpy as np

from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate

REPEATED = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %a = stablehlo.constant dense<2.0> : tensor<f32>
  %b = stablehlo.broadcast_in_dim %a, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %y = stablehlo.multiply %x, %b : tensor<4xf32>
  %c = stablehlo.constant dense<2.0> : tensor<f32>
  %d = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %z = stablehlo.add %y, %d : tensor<4xf32>
  return %z : tensor<4xf32>
}"""

BARRIERS = """
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %a = stablehlo.optimization_barrier %x : tensor<4xf32>
  %b = stablehlo.optimization_barrier %x : tensor<4xf32>
  %y = stablehlo.tanh %a : tensor<4xf32>
  %z = stablehlo.tanh %b : tensor<4xf32>
  return %y, %z : tensor<4xf32>, tensor<4xf32>
}"""

LOOP = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %ones = stablehlo.broadcast_in_dim %one, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %y = stablehlo.add %x, %ones : tensor<4xf32>
  %r:2 = stablehlo.while(%i = %zero, %v = %y) : tensor<i32>, tensor<4xf32>
  cond {
    %n = stablehlo.constant dense<3> : tensor<i32>
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %k = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %k : tensor<i32>
    %f = stablehlo.constant dense<1.0> : tensor<f32>
    %g = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<4xf32>
    %h = stablehlo.constant dense<1.0> : tensor<f32>
    %u = stablehlo.broadcast_in_dim %h, dims = [] : (tensor<f32>) -> tensor<4xf32>
    %m = stablehlo.multiply %g, %u : tensor<4xf32>
    %w = stablehlo.add %v, %m : tensor<4xf32>
    stablehlo.return %j, %w : tensor<i32>, tensor<4xf32>
  }
  return %r#1 : tensor<4xf32>
}"""


def names(source: str) -> list[str]:
    return [op.name for op in import_module(source).ops]


def test_repetitions_are_imported_once() -> None:
    assert names(REPEATED) == ["constant", "broadcast_in_dim", "multiply", "add"]


def test_barriers_stay_apart() -> None:
    assert names(BARRIERS) == ["optimization_barrier"] * 2 + ["tanh"] * 2


def test_a_loop_makes_its_own_repetitions() -> None:
    graph = import_module(LOOP)
    (loop,) = (op for op in graph.ops if op.name == "loop")
    assert len(loop.operands) == 2  # the counter and %v: nothing is captured
    assert [op.name for op in loop.regions[0].ops].count("broadcast_in_dim") == 2
    (value,) = evaluate(graph, [np.zeros(4, np.float32)])
    assert value.tolist() == [4.0] * 4
