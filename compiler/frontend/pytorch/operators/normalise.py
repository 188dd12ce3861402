"""Normalisations. Statistics are fp32 where the input has fewer bits, as in torch's kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.registry import ATEN


def _wide(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@ATEN.row("layer_norm")
def layer_norm(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Mean 0 and variance 1 over the last dims, then scale and offset."""
    wide, dims = _wide(x), tuple(range(x.ndim - len(shape), x.ndim))
    centred = wide - jnp.mean(wide, dims, keepdims=True)
    variance = jnp.mean(jnp.square(centred), dims, keepdims=True)
    return _scaled(centred * jax.lax.rsqrt(variance + eps), weight, bias)


@ATEN.row("rms_norm")
def rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """Root mean square 1 over the last dims, then scale."""
    wide, dims = _wide(x), tuple(range(x.ndim - len(shape), x.ndim))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    mean = jnp.mean(jnp.square(wide), dims, keepdims=True)
    return _scaled(wide * jax.lax.rsqrt(mean + eps), weight, None)


@ATEN.row("group_norm")
def group_norm(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Mean 0 and variance 1 over each group of channels of x [N, C, ...]."""
    wide = _wide(x).reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    centred = wide - jnp.mean(wide, 2, keepdims=True)
    variance = jnp.mean(jnp.square(centred), 2, keepdims=True)
    y = (centred * jax.lax.rsqrt(variance + eps)).reshape(x.shape)
    return _by_channel(y, weight, bias)


def _by_channel(x: Any, weight: Any, bias: Any) -> Any:
    shape = (1, -1, *[1] * (x.ndim - 2))
    parts = (None if part is None else part.reshape(shape) for part in (weight, bias))
    return _scaled(x, *parts)


def _batch_statistics(x: Any) -> tuple[Any, Any]:
    """Mean and variance of x [N, C, ...] by channel."""
    dims = (0, *range(2, x.ndim))
    mean = jnp.mean(x, dims)
    centred = x - mean.reshape(1, -1, *[1] * (x.ndim - 2))
    return mean, jnp.mean(jnp.square(centred), dims)


def _batch_normal(x: Any, mean: Any, variance: Any, weight: Any, bias: Any, eps: float) -> Any:
    shape = (1, -1, *[1] * (x.ndim - 2))
    y = (x - mean.reshape(shape)) * jax.lax.rsqrt(variance.reshape(shape) + eps)
    return _by_channel(y, weight, bias)


@ATEN.row("_native_batch_norm_legit_functional")
def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """x [N, C, ...] normalised by channel, with the next running statistics.

    In training by those of the batch: of all samples of the step, as torch's SyncBatchNorm. The
    running variance is the unbiased one.
    """
    wide = _wide(x)
    if not training:
        y = _batch_normal(wide, running_mean, running_var, weight, bias, eps)
        return y, running_mean[:0], running_var[:0], running_mean, running_var
    mean, variance = _batch_statistics(wide)
    y = _batch_normal(wide, mean, variance, weight, bias, eps)
    count = x.size // x.shape[1]
    held = jax.lax.stop_gradient((mean, variance * (count / max(1, count - 1))))
    mean_next, var_next = (
        (1 - momentum) * old + momentum * new
        for old, new in zip((running_mean, running_var), held, strict=True)
    )
    saved = jax.lax.rsqrt(variance + eps)
    return y, mean, saved, mean_next, var_next


@ATEN.row("_native_batch_norm_legit.no_stats")
def batch_norm_of_batch(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    """x [N, C, ...] normalised by channel by the statistics of the batch."""
    mean, variance = _batch_statistics(_wide(x))
    y = _batch_normal(_wide(x), mean, variance, weight, bias, eps)
    return y, mean, jax.lax.rsqrt(variance + eps)


@ATEN.row("_native_batch_norm_legit_no_training")
def batch_norm_of_running(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> Any:
    """x [N, C, ...] normalised by channel by running statistics."""
    y = _batch_normal(_wide(x), mean, variance, weight, bias, eps)
    return y, mean[:0], variance[:0]


@ATEN.row("batch_norm")
def batch_norm_plain(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Any:
    """x [N, C, ...] normalised by channel, where no running statistics are kept up."""
    if training or running_mean is None:
        return batch_norm_of_batch(x, weight, bias, True, momentum, eps)[0]
    return batch_norm_of_running(x, weight, bias, running_mean, running_var, momentum, eps)[0]
