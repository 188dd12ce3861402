"""Normalisation over batches, channels, groups and layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call, axis_of
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET


def _along(part: Any, rank: int, axis: int = 1) -> Any:
    """Numbers of channels beside an array."""
    return part.reshape([-1 if n == axis else 1 for n in range(rank)])


def _moments(x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """(mean, variance), with the axes as dims of 1."""
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axes, keepdims=True)


@MXNET.row("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm", frozen=(3, 4), has_own_type=True)
def _batch_norm(call: Call, x: Any, gamma: Any, beta: Any, mean: Any, variance: Any) -> Any:
    """By running statistics; in training by those of all samples of the step, unless the node says
    `use_global_stats`, and the running ones follow."""
    axis, kept = axis_of(call.integer("axis", 1), x.ndim), call.number("momentum", 0.9)
    wide = x.astype(jnp.float32)
    if call.training is not None and not call.flag("use_global_stats"):
        own = _moments(wide, [n for n in range(x.ndim) if n != axis])
        for name, old, new in zip(call.node.inputs[3:], (mean, variance), own, strict=True):
            call.training.changed[name] = old * kept + new.reshape(old.shape) * (1 - kept)
        mean, variance = (each.reshape(-1) for each in own)
    scale = jnp.ones_like(gamma) if call.flag("fix_gamma", True) else gamma
    by = scale * jax.lax.rsqrt(variance + call.number("eps", 1e-3))
    y = (wide - _along(mean, x.ndim, axis)) * _along(by, x.ndim, axis)
    y = (y + _along(beta, x.ndim, axis)).astype(x.dtype)
    return (y, mean, variance)[: call.count] if call.count > 1 else y


@MXNET.row("LayerNorm", has_own_type=True)
def _layer_norm(call: Call, x: Any, gamma: Any, beta: Any) -> Any:
    axis = axis_of(call.integer("axis", -1), x.ndim)
    mean, variance = _moments(x, (axis,))
    by = jax.lax.rsqrt(variance + call.number("eps", 1e-5))
    y = (x - mean) * by * _along(gamma, x.ndim, axis) + _along(beta, x.ndim, axis)
    results = y, jnp.squeeze(mean, axis), jnp.squeeze(1 / by, axis)
    return results[: call.count] if call.count > 1 else y


@MXNET.row("InstanceNorm")
def _instance_norm(call: Call, x: Any, gamma: Any, beta: Any) -> Any:
    mean, variance = _moments(x, range(2, x.ndim))
    y = (x - mean) * jax.lax.rsqrt(variance + call.number("eps", 1e-3))
    return y * _along(gamma, x.ndim) + _along(beta, x.ndim)


@MXNET.row("GroupNorm")
def _group_norm(call: Call, x: Any, gamma: Any, beta: Any) -> Any:
    """Each group has one scale and one shift."""
    groups = call.integer("num_groups", 1)
    if groups < 1 or x.shape[1] % groups:
        raise unfit(f"groups that share out {x.shape[1]} channels", str(groups))
    rows = x.reshape(x.shape[0], groups, -1)
    mean, variance = _moments(rows, (2,))
    y = (rows - mean) * jax.lax.rsqrt(variance + call.number("eps", 1e-5))
    return (y * gamma.reshape(1, -1, 1) + beta.reshape(1, -1, 1)).reshape(x.shape)


@MXNET.row("LRN")
def _lrn(call: Call, x: Any) -> Any:
    size = call.integer("nsize", 5)
    squares = jax.lax.reduce_window(
        x * x,
        np.zeros((), x.dtype)[()],
        jax.lax.add,
        (1, size, *[1] * (x.ndim - 2)),
        (1,) * x.ndim,
        [(0, 0), (size // 2, size // 2), *[(0, 0)] * (x.ndim - 2)],
    )
    alpha, beta = call.number("alpha", 1e-4), call.number("beta", 0.75)
    return x * (call.number("knorm", 2.0) + alpha / size * squares) ** -beta
