"""Losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.gradients import absolute, with_slope
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN

NONE, MEAN = 0, 1
"""What becomes of the losses of single elements; 2 is their sum."""


def reduced(losses: Any, reduction: int) -> Any:
    """Losses as `reduction` says: each, their mean, or their sum."""
    if reduction == NONE:
        return losses
    return jnp.mean(losses) if reduction == MEAN else jnp.sum(losses)


def _likelihood(
    log_p: Any, target: Any, weight: Any, reduction: int, ignore: int, smoothing: float
) -> Any:
    """Minus log-likelihood of class indices; `log_p` is [N, C, ...] or [C]. Ignored ones count
    neither in the sum nor in its weight."""
    axis = 0 if log_p.ndim == 1 else 1
    is_counted = target != ignore
    index = jnp.expand_dims(jnp.where(is_counted, target, 0), axis)
    picked = jnp.take_along_axis(log_p, index, axis, mode="clip").squeeze(axis)
    scale = is_counted.astype(log_p.dtype)
    if weight is not None:
        scale = scale * weight[jnp.where(is_counted, target, 0)]
    losses = jnp.where(is_counted, -picked * scale, 0)  # also where an ignored one is infinite
    if smoothing:
        shape = [1] * log_p.ndim
        shape[axis] = -1
        spread = log_p if weight is None else log_p * weight.reshape(shape)
        smooth = -jnp.sum(spread, axis) * is_counted
        losses = (1 - smoothing) * losses + smoothing / log_p.shape[axis] * smooth
    if reduction == MEAN:
        return jnp.sum(losses) / jnp.sum(scale)
    return reduced(losses, reduction)


@ATEN.row("cross_entropy_loss")
def cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross-entropy of logits [N, C, ...] with classes [N, ...] or with chances [N, C, ...]."""
    axis = 0 if x.ndim == 1 else 1
    log_p = jax.nn.log_softmax(x, axis)
    if target.ndim < x.ndim:
        return _likelihood(log_p, target, weight, reduction, ignore_index, label_smoothing)
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[axis]
    if weight is not None:
        target = target * weight.reshape([-1 if n == axis else 1 for n in range(x.ndim)])
    losses = -jnp.sum(log_p * target, axis)
    if reduction == MEAN:
        return jnp.sum(losses) / losses.size
    return reduced(losses, reduction)


@ATEN.row("nll_loss_nd", "nll_loss", "nll_loss2d")
def nll_loss(
    x: Any, target: Any, weight: Any = None, reduction: int = MEAN, ignore_index: int = -100
) -> Any:
    """Minus the log-likelihoods x [N, C, ...] of classes [N, ...]."""
    return _likelihood(x, target, weight, reduction, ignore_index, 0.0)


@ATEN.row("mse_loss")
def mse_loss(x: Any, target: Any, reduction: int = MEAN) -> Any:
    """Squared differences."""
    return reduced(jnp.square(x - target), reduction)


@ATEN.row("l1_loss")
def l1_loss(x: Any, target: Any, reduction: int = MEAN) -> Any:
    """Absolute differences."""
    return reduced(absolute(x - target), reduction)


@ATEN.row("smooth_l1_loss")
def smooth_l1_loss(x: Any, target: Any, reduction: int = MEAN, beta: float = 1.0) -> Any:
    """Squared differences over 2 beta, absolute ones less beta / 2 from beta on."""
    d = absolute(x - target)
    square = 0.5 * d * d / beta if beta else d
    return reduced(jnp.where(d < beta, square, d - 0.5 * beta), reduction)


@ATEN.row("huber_loss")
def huber_loss(x: Any, target: Any, reduction: int = MEAN, delta: float = 1.0) -> Any:
    """Half the squared differences, linear from delta on."""
    return delta * smooth_l1_loss(x, target, reduction, delta)


@ATEN.row("binary_cross_entropy_with_logits")
def bce_with_logits(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> Any:
    """Cross-entropy of two classes, of logits."""
    scale = 1 if pos_weight is None else 1 + (pos_weight - 1) * target
    losses = (1 - target) * x + scale * jax.nn.softplus(-x)
    return reduced(losses if weight is None else losses * weight, reduction)


@ATEN.row("binary_cross_entropy")
def bce(x: Any, target: Any, weight: Any = None, reduction: int = MEAN) -> Any:
    """Cross-entropy of two classes, of chances; logarithms are at least -100, and what the
    gradient divides by is at least 1e-12, as torch's."""
    losses = _bce(x, target)
    return reduced(losses if weight is None else losses * weight, reduction)


def _logarithms(x: Any) -> tuple[Any, Any]:
    """Of a chance and of the other one."""
    return jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log(1 - x), -100)


def _entropy(x: Any, target: Any) -> Any:
    yes, no = _logarithms(x)
    return -(target * yes + (1 - target) * no)


def _by_target(x: Any, _: Any) -> Any:
    yes, no = _logarithms(x)
    return no - yes


_bce = with_slope(
    _entropy, lambda x, target: (x - target) / jnp.maximum(x * (1 - x), 1e-12), _by_target
)


@ATEN.row("kl_div")
def kl_div(x: Any, target: Any, reduction: int = MEAN, log_target: bool = False) -> Any:
    """Kullback-Leibler divergence of log-chances x from target."""
    if log_target:
        return reduced(jnp.exp(target) * (target - x), reduction)
    safe = jnp.where(target > 0, target, 1)
    return reduced(jnp.where(target > 0, target * jnp.log(safe), 0) - target * x, reduction)
