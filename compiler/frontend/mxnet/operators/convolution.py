"""Convolutions and pooling; images are [N, C, ...], as MXNet's CPUs have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call
from shardwright.compiler.frontend.graphs.windows import Pads, convolved_back, pooled
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET, whole_numbers

_LAYOUTS = ("NCW", "NCHW", "NCDHW")


def _spatial(call: Call, name: str, count: int, usual: int = 1) -> tuple[int, ...]:
    """A setting for each of `count` spatial dims."""
    found = whole_numbers(call, name) or (usual,) * count
    if len(found) != count or min(found) < usual:
        raise unfit(f"{name} of {count} numbers from {usual}", str(list(found)))
    return found


def _check_layout(call: Call, x: Any) -> int:
    """The number of spatial dims."""
    layout, count = call.text("layout", ""), int(x.ndim) - 2
    if layout not in ("", *_LAYOUTS):
        raise NotImplementedError(f"layout {layout}")
    if not 1 <= count <= 3:
        raise unfit("images [N, C, ...] of one to three dims", str(list(x.shape)))
    return count


def _with_bias(call: Call, y: Any, bias: Any) -> Any:
    return y if bias is None else y + bias.reshape(1, -1, *[1] * (y.ndim - 2))


@MXNET.row("Convolution", "Convolution_v1")
def _convolution(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    count = _check_layout(call, x)
    kernel = _spatial(call, "kernel", count)
    if weight.shape[2:] != kernel:
        raise unfit(f"a weight of {list(kernel)}", str(list(weight.shape)))
    pads = _spatial(call, "pad", count, 0)
    y = jax.lax.conv_general_dilated(
        x,
        weight,
        _spatial(call, "stride", count),
        [(pad, pad) for pad in pads],
        rhs_dilation=_spatial(call, "dilate", count),
        feature_group_count=call.integer("num_group", 1),
    )
    return _with_bias(call, y, None if call.flag("no_bias") else bias)


@MXNET.row("Deconvolution")
def _deconvolution(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    count = _check_layout(call, x)
    kernel, strides = _spatial(call, "kernel", count), _spatial(call, "stride", count)
    dilations, pads = _spatial(call, "dilate", count), _spatial(call, "pad", count, 0)
    extra, reach = _spatial(call, "adj", count, 0), []
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    target = whole_numbers(call, "target_shape")
    if target and any(target):
        pads, extra = _fitted(x, target, strides, reach)
    edges = [(r - p, r - p + e) for r, p, e in zip(reach, pads, extra, strict=True)]
    groups = call.integer("num_group", 1)
    y = convolved_back(x, weight, strides, dilations, edges, groups)
    return _with_bias(call, y, None if call.flag("no_bias", True) else bias)


def _fitted(
    x: Any, target: Sequence[int], strides: Sequence[int], reach: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(pads, extra) of a deconvolution whose result has a size. Source: `InferPad` of MXNet."""
    pads, extra = [], []
    for n, size, stride, far in zip(x.shape[2:], target, strides, reach, strict=True):
        over = stride * (n - 1) + far + 1 - size
        if over < 0:
            raise unfit(f"a target shape of at most {over + size}", str(size))
        pads.append((over + 1) // 2)
        extra.append(over % 2)
    return tuple(pads), tuple(extra)


def _windows(call: Call, x: Any) -> tuple[list[tuple[int, ...]], Pads, Pads]:
    """(window, strides and dilations, pads, what the last windows reach over them)."""
    count = _check_layout(call, x)
    kernel, strides = _spatial(call, "kernel", count), _spatial(call, "stride", count)
    convention = call.one_of("pooling_convention", "valid", "valid", "full", "same")
    pads = [(pad, pad) for pad in _spatial(call, "pad", count, 0)]
    if convention == "same":
        raise NotImplementedError("pooling_convention same")
    more = [(0, 0)] * count
    for axis, (n, (pad, _), k, s) in enumerate(
        zip(x.shape[2:], pads, kernel, strides, strict=True)
    ):
        left = n + 2 * pad - k
        if left < 0:
            raise unfit(f"a kernel of at most {n + 2 * pad}", str(k))
        if convention == "full":
            more[axis] = (0, -(-left // s) * s - left)
    return [kernel, strides, (1,) * count], pads, [(0, max(b, 0)) for _, b in more]


def _joined(pads: Pads, more: Pads) -> Pads:
    return [(a + c, b + d) for (a, b), (c, d) in zip(pads, more, strict=True)]


_POOLED = ("max", "avg", "sum", "lp")


@MXNET.row("Pooling", "Pooling_v1")
def _pooling(call: Call, x: Any) -> Any:
    kind, power = call.one_of("pool_type", "max", *_POOLED), call.integer("p_value", 2)
    if call.flag("global_pool"):
        return _of_all(x, kind, power)
    settings, pads, more = _windows(call, x)
    edges = _joined(pads, more)
    if kind == "max":
        least = -math.inf if x.dtype.kind not in "iu" else jnp.iinfo(x.dtype).min
        return pooled(x, least, jax.lax.max, settings, edges)
    if kind == "lp":
        sums = pooled(jnp.abs(x) ** power, 0, jax.lax.add, settings, edges)
        return sums ** (1 / power)
    sums = pooled(x, 0, jax.lax.add, settings, edges)
    if kind == "sum":
        return sums
    ones = jnp.ones((1, 1, *x.shape[2:]), x.dtype)
    if call.flag("count_include_pad", True):
        ones, edges = jnp.pad(ones, [(0, 0), (0, 0), *pads], constant_values=1), more
    return sums / pooled(ones, 0, jax.lax.add, settings, edges)


def _of_all(x: Any, kind: str, power: int) -> Any:
    """One window over all of an image."""
    axes = tuple(range(2, x.ndim))
    if kind == "lp":
        return jnp.sum(jnp.abs(x) ** power, axes, keepdims=True) ** (1 / power)
    reduce: dict[str, Callable[..., Any]] = {"max": jnp.max, "avg": jnp.mean, "sum": jnp.sum}
    return reduce[kind](x, axes, keepdims=True)


@MXNET.row("_contrib_AdaptiveAvgPooling2D")
def _adaptive_average(call: Call, x: Any) -> Any:
    """Means of parts that share out a dim, where they do not divide it overlapping."""
    asked = whole_numbers(call, "output_size") or (1, 1)
    sizes = asked * 2 if len(asked) == 1 else asked
    for axis, new in zip((2, 3), sizes, strict=True):
        old = x.shape[axis]
        ends = [(n * old // new, -(-(n + 1) * old // new)) for n in range(new)]
        parts = [
            jnp.mean(jax.lax.slice_in_dim(x, a, b, axis=axis), axis, keepdims=True) for a, b in ends
        ]
        x = jnp.concatenate(parts, axis)
    return x
