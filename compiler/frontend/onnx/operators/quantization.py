"""Numbers of 8 bits and the scales they stand for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call, axis_of
from shardwright.compiler.frontend.graphs.types import computed_type
from shardwright.compiler.frontend.onnx.operators.registry import ONNX
from shardwright.compiler.frontend.onnx.tensors import type_of


def dequantized(x: Any, scale: Any, zero: Any = None) -> Any:
    """The numbers that x stands for, in the type of the scale (fp32 where that is whole)."""
    if zero is not None and x.dtype.kind in "iu":
        x = x.astype(jnp.int32) - zero.astype(jnp.int32)
    return x.astype(scale.dtype) * scale


def quantized(x: Any, scale: Any, zero: Any) -> Any:
    """x divided by its scale and rounded, in the type of `zero`, at whose ends it stops."""
    dtype = np.dtype(zero.dtype)
    if dtype.kind not in "iu" and not dtype.name.endswith("int4"):
        most = float(jnp.finfo(dtype).max)
        return jnp.clip((x / scale).astype(jnp.float32), -most, most).astype(dtype)
    limits = jnp.iinfo(dtype)
    rounded = jnp.round(x / scale) + zero.astype(jnp.float32)
    return jnp.clip(rounded, int(limits.min), int(limits.max)).astype(computed_type(dtype))


def _spread(call: Call, part: Any, x: Any) -> Any:
    """A scale or zero point for every element of x: one for all, per index of an axis, or per
    block of so many along it."""
    if part is None or part.size == 1:
        return part if part is None else part.reshape(())
    axis, block = axis_of(call.integer("axis", 1), x.ndim), call.integer("block_size")
    if block:
        size = x.shape[axis]
        return call.xp.repeat(part, block, axis)[
            tuple(slice(size) if n == axis else slice(None) for n in range(x.ndim))
        ]
    if part.size != x.shape[axis]:
        raise unfit(f"{x.shape[axis]} scales of axis {axis}", str(part.size))
    return part.reshape([-1 if n == axis else 1 for n in range(x.ndim)])


@ONNX.row("DequantizeLinear", frozen=(1, 2), has_own_type=True)
def _dequantize_linear(call: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    return dequantized(x, _spread(call, scale, x), _spread(call, zero, x))


@ONNX.row("QuantizeLinear", static=(2,), frozen=(1,), has_own_type=True)
def _quantize_linear(call: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    if zero is None:
        number = call.integer("output_dtype")
        zero = np.zeros((), type_of(number, "QuantizeLinear") if number else np.uint8)
    return quantized(x, _spread(call, scale, x), _spread(call, zero, x))


@ONNX.row("DynamicQuantizeLinear", has_own_type=True)
def _dynamic_quantize_linear(call: Call, x: Any) -> Any:
    """By the range of x itself. Source: the operator's page."""
    low, high = jnp.minimum(jnp.min(x), 0), jnp.maximum(jnp.max(x), 0)
    scale = (high - low) / 255
    divisor = jnp.where(scale == 0, 1, scale)
    zero = jnp.clip(jnp.round(-low / divisor), 0, 255).astype(jnp.uint8)
    return quantized(x, divisor, zero), scale, zero
