"""Convolutions and pooling; images are [N, C, ...]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call
from shardwright.compiler.frontend.graphs.windows import Pads, convolved_back, pooled
from shardwright.compiler.frontend.onnx.operators.quantization import dequantized, quantized
from shardwright.compiler.frontend.onnx.operators.registry import ONNX

_AUTO = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def _spatial(call: Call, name: str, count: int, usual: int = 1) -> tuple[int, ...]:
    """A setting for each of `count` spatial dims."""
    found = call.ints(name) or (usual,) * count
    if len(found) != count or min(found) < usual:
        raise unfit(f"{name} of {count} numbers from {usual}", str(list(found)))
    return found


def _same(total: int, is_upper: bool) -> tuple[int, int]:
    """So much padding on both ends, the odd one at the end or in front."""
    total = max(total, 0)
    half = total // 2
    return (half, total - half) if is_upper else (total - half, half)


def _pads(
    call: Call,
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Pads:
    """The padding of each spatial dim, as the node says it or asks for it."""
    auto, count = call.one_of("auto_pad", "NOTSET", *_AUTO), len(sizes)
    if auto.startswith("SAME"):
        rows = zip(sizes, window, strides, dilations, strict=True)
        return [
            _same((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, auto == "SAME_UPPER")
            for n, k, s, d in rows
        ]
    found = call.ints("pads") if auto == "NOTSET" else None
    found = found or (0,) * (2 * count)
    if len(found) != 2 * count or min(found) < 0:
        raise unfit(f"pads of {2 * count} numbers from 0", str(list(found)))
    return [(found[n], found[n + count]) for n in range(count)]


def _convolved(call: Call, x: Any, weight: Any) -> Any:
    count = x.ndim - 2
    strides, dilations = (_spatial(call, name, count) for name in ("strides", "dilations"))
    pads = _pads(call, x.shape[2:], weight.shape[2:], strides, dilations)
    return jax.lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.asarray(weight),
        strides,
        pads,
        rhs_dilation=dilations,
        feature_group_count=call.integer("group", 1),
    )


def _with_bias(y: Any, bias: Any) -> Any:
    return y if bias is None else y + bias.reshape(1, -1, *[1] * (y.ndim - 2))


@ONNX.row("Conv")
def _conv(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    return _with_bias(_convolved(call, x, weight), bias)


@ONNX.row("ConvInteger", frozen=(2, 3), has_own_type=True)
def _conv_integer(call: Call, x: Any, weight: Any, x_zero: Any = None, w_zero: Any = None) -> Any:
    """Products of 8 bits are sums of whole numbers in fp32, exact up to 2**24."""
    one = jnp.ones((), jnp.float32)
    of_channels = None if w_zero is None else _by_channel(w_zero, weight)
    y = _convolved(call, dequantized(x, one, x_zero), dequantized(weight, one, of_channels))
    return jnp.round(y).astype(jnp.int32)


def _by_channel(part: Any, weight: Any) -> Any:
    """One number for all of a weight, or one for each of its results."""
    return part if part.ndim == 0 else part.reshape(-1, *[1] * (weight.ndim - 1))


@ONNX.row("QLinearConv", frozen=(1, 2, 4, 5, 6, 7), has_own_type=True)
def _q_linear_conv(
    call: Call,
    x: Any,
    x_scale: Any,
    x_zero: Any,
    weight: Any,
    w_scale: Any,
    w_zero: Any,
    y_scale: Any,
    y_zero: Any,
    bias: Any = None,
) -> Any:
    by_channel = (_by_channel(part, weight) for part in (w_scale, w_zero))
    y = _convolved(call, dequantized(x, x_scale, x_zero), dequantized(weight, *by_channel))
    own = None if bias is None else bias.astype(jnp.float32) * (x_scale * w_scale)
    return quantized(_with_bias(y, own), y_scale, y_zero)


@ONNX.row("ConvTranspose")
def _conv_transpose(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    """The convolution whose gradient with respect to its input this is, turned around."""
    count = x.ndim - 2
    strides, dilations = (_spatial(call, name, count) for name in ("strides", "dilations"))
    extra = _spatial(call, "output_padding", count, 0)
    reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
    cut = _cut(call, x.shape[2:], strides, reach, extra)
    rows = zip(reach, cut, extra, strict=True)
    pads = [(r - before, r - behind + e) for r, (before, behind), e in rows]
    y = convolved_back(x, weight, strides, dilations, pads, call.integer("group", 1))
    return _with_bias(y, bias)


def _cut(
    call: Call,
    sizes: Sequence[int],
    strides: Sequence[int],
    reach: Sequence[int],
    extra: Sequence[int],
) -> Pads:
    """What is left out of a transposed convolution at the ends of each dim. Source: the formulas
    of the operator's page."""
    auto, asked = call.one_of("auto_pad", "NOTSET", *_AUTO), call.ints("output_shape")
    if asked is None and not auto.startswith("SAME"):
        return _pads(call, sizes, reach, strides, reach)
    wanted = asked[-len(sizes) :] if asked else [n * s for n, s in zip(sizes, strides, strict=True)]
    found = []
    for n, s, r, e, size in zip(sizes, strides, reach, extra, wanted, strict=True):
        total = s * (n - 1) + e + r + 1 - size
        half = total // 2
        found.append((half, total - half) if auto == "SAME_UPPER" else (total - half, half))
    return found


def _windows(call: Call, x: Any) -> tuple[tuple[int, ...], ...]:
    """(window, strides, dilations) of each spatial dim."""
    count = x.ndim - 2
    names = ("kernel_shape", "strides", "dilations")
    window, strides, dilations = (_spatial(call, name, count) for name in names)
    return window, strides, dilations


def _rounded_up(call: Call, x: Any, pads: Pads, settings: Sequence[Sequence[int]]) -> Pads:
    """Padding behind each dim that the last window reaches over, where sizes are rounded up; a
    window that begins in the padding is none."""
    if not call.integer("ceil_mode"):
        return [(0, 0)] * len(pads)
    found = []
    for n, (before, behind), k, s, d in zip(x.shape[2:], pads, *settings, strict=True):
        reach, whole = d * (k - 1) + 1, n + before + behind
        count = -(-(whole - reach) // s) + 1
        count -= (count - 1) * s >= n + before
        found.append((0, max((count - 1) * s + reach - whole, 0)))
    return found


def _joined(pads: Pads, more: Pads) -> Pads:
    return [(a + c, b + d) for (a, b), (c, d) in zip(pads, more, strict=True)]


@ONNX.row("MaxPool")
def _max_pool(call: Call, x: Any) -> Any:
    if call.wants(1):
        raise NotImplementedError("the places of the largest elements as a result")
    settings = _windows(call, x)
    pads = _pads(call, x.shape[2:], *settings)
    pads = _joined(pads, _rounded_up(call, x, pads, settings))
    least = -math.inf if x.dtype.kind not in "iu" else jnp.iinfo(x.dtype).min
    return pooled(x, least, jax.lax.max, settings, pads)


@ONNX.row("AveragePool")
def _average_pool(call: Call, x: Any) -> Any:
    settings = _windows(call, x)
    pads = _pads(call, x.shape[2:], *settings)
    more = _rounded_up(call, x, pads, settings)
    sums = pooled(x, 0, jax.lax.add, settings, _joined(pads, more))
    ones = jnp.ones((1, 1, *x.shape[2:]), x.dtype)
    if call.integer("count_include_pad"):
        ones, rest = jnp.pad(ones, [(0, 0), (0, 0), *pads], constant_values=1), more
    else:
        rest = _joined(pads, more)
    return sums / pooled(ones, 0, jax.lax.add, settings, rest)


@ONNX.row("LpPool")
def _lp_pool(call: Call, x: Any) -> Any:
    settings, p = _windows(call, x), call.integer("p", 2)
    pads = _pads(call, x.shape[2:], *settings)
    pads = _joined(pads, _rounded_up(call, x, pads, settings))
    return pooled(jnp.abs(x) ** p, 0, jax.lax.add, settings, pads) ** (1 / p)


def _spatial_axes(x: Any) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@ONNX.row("GlobalLpPool")
def _global_lp_pool(call: Call, x: Any) -> Any:
    p = call.integer("p", 2)
    return jnp.sum(jnp.abs(x) ** p, _spatial_axes(x), keepdims=True) ** (1 / p)


ONNX.rows(
    {
        "GlobalAveragePool": lambda _, x: jnp.mean(x, _spatial_axes(x), keepdims=True),
        "GlobalMaxPool": lambda _, x: jnp.max(x, _spatial_axes(x), keepdims=True),
    }
)
