"""Products of matrices, in numbers and in quantized ones."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from shardwright.compiler.frontend.graphs.table import Call
from shardwright.compiler.frontend.onnx.operators.quantization import dequantized, quantized
from shardwright.compiler.frontend.onnx.operators.registry import ONNX

ONNX.rows({"MatMul": lambda call, a, b: call.xp.matmul(a, b)}, folds=True)


@ONNX.row("Gemm")
def _gemm(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    a = a.T if call.integer("transA") else a
    b = b.T if call.integer("transB") else b
    alpha, beta = call.number("alpha", 1.0), call.number("beta", 1.0)
    found = jnp.matmul(a, b)
    found = found if alpha == 1 else alpha * found
    if c is None or not beta:
        return found
    return found + (c if beta == 1 else beta * c)


@ONNX.row("Einsum")
def _einsum(call: Call, *operands: Any) -> Any:
    return jnp.einsum(call.text("equation").replace(" ", ""), *operands)


@ONNX.row("MatMulInteger", frozen=(2, 3), has_own_type=True)
def _mat_mul_integer(call: Call, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    a, b = a.astype(jnp.int32), b.astype(jnp.int32)
    if a_zero is not None:  # one number, or one per row
        zero = a_zero.astype(jnp.int32)
        a = a - (zero[..., None] if zero.ndim == 1 and zero.size > 1 else zero)
    b = b if b_zero is None else b - b_zero.astype(jnp.int32)
    return jnp.matmul(a, b)


@ONNX.row("QLinearMatMul", frozen=(1, 2, 4, 5, 6, 7), has_own_type=True)
def _q_linear_mat_mul(
    call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, *result: Any
) -> Any:
    a = dequantized(a, _column(a_scale), _column(a_zero))
    return quantized(jnp.matmul(a, dequantized(b, b_scale, b_zero)), *result)


def _column(x: Any) -> Any:
    """Numbers of rows, as a column."""
    return x[..., None] if x.ndim == 1 and x.size > 1 else x
