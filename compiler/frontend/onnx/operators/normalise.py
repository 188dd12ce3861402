"""Normalisation over batches, channels, groups and layers, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.table import Call, axes_of, axis_of
from shardwright.compiler.frontend.onnx.operators.registry import ONNX


def _by_channel(part: Any, x: Any) -> Any:
    """Numbers of channels beside x [N, C, ...]."""
    return part.reshape(1, -1, *[1] * (x.ndim - 2))


def _standard(x: Any, axes: Sequence[int], epsilon: float) -> Any:
    """x of mean 0 and variance 1 over axes."""
    mean = jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + epsilon)


@ONNX.row("BatchNormalization", frozen=(3, 4), has_own_type=True)
def _batch_normalization(
    call: Call, x: Any, scale: Any, bias: Any, mean: Any, variance: Any
) -> Any:
    """By the statistics that are given, or, in training, by those of the batch."""
    epsilon, kept = call.number("epsilon", 1e-5), call.number("momentum", 0.9)
    changed: tuple[Any, ...] = ()
    if call.integer("training_mode"):
        axes = (0, *range(2, x.ndim))
        own = jnp.mean(x, axes)
        spread = jnp.mean(jnp.square(x - _by_channel(own, x)), axes)
        changed = (mean * kept + own * (1 - kept), variance * kept + spread * (1 - kept))
        mean, variance = own, spread
    by = scale * jax.lax.rsqrt(variance + epsilon)
    y = (x - _by_channel(mean, x)) * _by_channel(by, x) + _by_channel(bias, x)
    y = y.astype(x.dtype)
    return (y, *changed)[: call.count] if call.count > 1 else y


@ONNX.row("InstanceNormalization")
def _instance_normalization(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    y = _standard(x, range(2, x.ndim), call.number("epsilon", 1e-5))
    return y * _by_channel(scale, x) + _by_channel(bias, x)


@ONNX.row("LayerNormalization", since=17, has_own_type=True)
def _layer_normalization(call: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    """The statistics in fp32, unless the node says otherwise."""
    axes = tuple(range(axis_of(call.integer("axis", -1), x.ndim), x.ndim))
    wide = x.astype(jnp.float32) if call.integer("stash_type", 1) == 1 else x
    mean = jnp.mean(wide, axes, keepdims=True)
    centred = wide - mean
    variance = jnp.mean(jnp.square(centred), axes, keepdims=True)
    by = jax.lax.rsqrt(variance + call.number("epsilon", 1e-5))
    y = (centred * by).astype(x.dtype) * scale
    y = y if bias is None else y + bias
    return (y, mean, by)[: call.count] if call.count > 1 else y


def _grouped(call: Call, x: Any) -> Any:
    groups = call.integer("num_groups")
    rows = x.reshape(x.shape[0], groups, -1).astype(jnp.float32)
    return _standard(rows, (2,), call.number("epsilon", 1e-5))


@ONNX.row("GroupNormalization", since=21)
def _group_normalization(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    y = _grouped(call, x).reshape(x.shape).astype(x.dtype)
    return y * _by_channel(scale, x) + _by_channel(bias, x)


@ONNX.row("GroupNormalization", since=18)
def _group_normalization_by_group(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    y = _grouped(call, x) * scale.reshape(1, -1, 1) + bias.reshape(1, -1, 1)
    return y.reshape(x.shape)


@ONNX.row("LpNormalization")
def _lp_normalization(call: Call, x: Any) -> Any:
    axis = axis_of(call.integer("axis", -1), x.ndim)
    if call.integer("p", 2) == 1:
        norm = jnp.sum(jnp.abs(x), axis, keepdims=True)
    else:
        norm = jnp.sqrt(jnp.sum(x * x, axis, keepdims=True))
    return jnp.where(norm == 0, 0, x / jnp.where(norm == 0, 1, norm))


@ONNX.row("MeanVarianceNormalization")
def _mean_variance_normalization(call: Call, x: Any) -> Any:
    """Source: the function of the operator's page, whose divisor has 1e-9 added."""
    axes = axes_of(call.ints("axes") or (0, 2, 3), x.ndim)
    centred = x - jnp.mean(x, axes, keepdims=True)
    return centred / (jnp.sqrt(jnp.mean(jnp.square(centred), axes, keepdims=True)) + 1e-9)


@ONNX.row("LRN")
def _lrn(call: Call, x: Any) -> Any:
    size = call.integer("size", 1)
    squares = jax.lax.reduce_window(
        x * x,
        np.zeros((), x.dtype)[()],
        jax.lax.add,
        (1, size, *[1] * (x.ndim - 2)),
        (1,) * x.ndim,
        [(0, 0), ((size - 1) // 2, size - 1 - (size - 1) // 2), *[(0, 0)] * (x.ndim - 2)],
    )
    alpha, beta = call.number("alpha", 1e-4), call.number("beta", 0.75)
    return x / (call.number("bias", 1.0) + alpha / size * squares) ** beta


def _picked(call: Call, scores: Any, target: Any, weight: Any) -> Any:
    """The mean, sum or all of the negative scores [N, C, ...] of target classes [N, ...]."""
    ignored = call.node.attributes.get("ignore_index")
    target = jnp.asarray(target)
    counts = jnp.ones(target.shape, scores.dtype)
    if ignored is not None:
        counts = (target != call.integer("ignore_index")).astype(scores.dtype)
        target = jnp.where(target == call.integer("ignore_index"), 0, target)
    counts = counts if weight is None else counts * jnp.take(weight, target, mode="clip")
    own = jnp.take_along_axis(scores, target[:, None], 1, mode="clip")[:, 0]
    found = -own * counts
    how = call.one_of("reduction", "mean", "none", "sum", "mean")
    if how == "none":
        return found
    return jnp.sum(found) / jnp.sum(counts) if how == "mean" else jnp.sum(found)


@ONNX.row("NegativeLogLikelihoodLoss")
def _negative_log_likelihood_loss(call: Call, scores: Any, target: Any, weight: Any = None) -> Any:
    return _picked(call, scores, target, weight)


@ONNX.row("SoftmaxCrossEntropyLoss", has_own_type=True)
def _softmax_cross_entropy_loss(call: Call, scores: Any, target: Any, weight: Any = None) -> Any:
    logs = jax.nn.log_softmax(scores, 1)
    found = _picked(call, logs, target, weight).astype(scores.dtype)
    return (found, logs) if call.count > 1 else found
