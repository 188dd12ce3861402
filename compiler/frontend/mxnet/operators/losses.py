"""Heads that say what a graph is trained for.

In inference they are what they predict. In training a head adds its loss, the sum over samples
whose gradient is the one that MXNet gives it; what is behind a head gives none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.table import Call, Label
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET

Loss = Callable[[Call, Any, Any], Any]


def _told(call: Call, x: Any, label: Any, row: Label, loss: Loss) -> None:
    """Tell a step the loss of x by its label, or the label that it needs."""
    if call.training is None:
        return
    if label is None:
        call.training.labels[call.node.inputs[1]] = row
    else:
        call.training.losses.append(call.number("grad_scale", 1.0) * loss(call, x, label))


_NORMALISED = ("null", "batch", "valid")


@MXNET.row("SoftmaxOutput", "Softmax", is_loss=True, labels=(1,))
def _softmax_output(call: Call, x: Any, label: Any = None) -> Any:
    """Over the second dim, or the last one where dims are preserved, or all but the first."""
    axis, scores = _classes(call, x)
    shape = tuple(dim for n, dim in enumerate(scores.shape) if n != axis)
    row = Label(shape, np.int32, scores.shape[axis])
    _told(call, scores, label, row, _cross_entropy)
    return jax.lax.stop_gradient(jax.nn.softmax(scores, axis)).reshape(x.shape)


def _classes(call: Call, x: Any) -> tuple[int, Any]:
    """(the dim of classes, x with that dim)."""
    if call.flag("multi_output"):
        return 1, x
    if call.flag("preserve_shape") or x.ndim == 2:
        return x.ndim - 1, x
    return 1, x.reshape(x.shape[0], -1)


def _cross_entropy(call: Call, x: Any, label: Any) -> Any:
    axis, _ = _classes(call, x)
    logs = jax.nn.log_softmax(x, axis)
    if label.shape == x.shape:  # probabilities
        return -jnp.sum(logs * label)
    own = label.reshape([dim for n, dim in enumerate(x.shape) if n != axis])
    classes = x.shape[axis]
    hot = jax.nn.one_hot(own.astype(jnp.int32), classes, dtype=x.dtype, axis=axis)
    smooth = call.number("smooth_alpha")
    hot = hot * (1 - smooth) + (1 - hot) * (smooth / (classes - 1)) if smooth else hot
    counts = jnp.ones(own.shape, x.dtype)
    if call.flag("use_ignore"):
        counts = (own != call.number("ignore_label", -1.0)).astype(x.dtype)
    total = -jnp.sum(jnp.sum(logs * hot, axis) * counts)
    how = call.one_of("normalization", "null", *_NORMALISED)
    if how == "batch":
        return total / x.shape[0]
    if how == "valid":
        return total / jnp.maximum(jax.lax.stop_gradient(jnp.sum(counts)), 1)
    # Several places of a sample are one label: their gradients are shared out.
    return total / math.prod(x.shape[2:]) if call.flag("multi_output") else total


def _regression(predict: Callable[[Any], Any], loss: Callable[[Any, Any], Any]) -> Loss:
    """A head that compares each number with its label; the numbers of a sample share its loss."""

    def row(call: Call, x: Any, label: Any = None) -> Any:
        def total(_: Call, x: Any, label: Any) -> Any:
            own = label.reshape(x.shape)
            return jnp.sum(loss(x, own)) / math.prod(x.shape[1:])

        _told(call, x, label, Label(tuple(x.shape), np.float32), total)
        return jax.lax.stop_gradient(predict(x))

    return row


def _logistic(x: Any, label: Any) -> Any:
    return jax.nn.softplus(x) - x * label


_REGRESSIONS = {
    "LinearRegressionOutput": _regression(lambda x: x, lambda x, y: 0.5 * jnp.square(x - y)),
    "LogisticRegressionOutput": _regression(jax.nn.sigmoid, _logistic),
    "MAERegressionOutput": _regression(lambda x: x, lambda x, y: jnp.abs(x - y)),
}
MXNET.rows(_REGRESSIONS, is_loss=True, labels=(1,))


@MXNET.row("SVMOutput", is_loss=True, labels=(1,))
def _svm_output(call: Call, x: Any, label: Any = None) -> Any:
    def hinge(call: Call, x: Any, label: Any) -> Any:
        own = jax.nn.one_hot(label.astype(jnp.int32), x.shape[1], dtype=x.dtype)
        short = jnp.maximum(call.number("margin", 1.0) - (2 * own - 1) * x, 0)
        by = call.number("regularization_coefficient", 1.0)
        return by * jnp.sum(short if call.flag("use_linear") else jnp.square(short))

    _told(call, x, label, Label((x.shape[0],), np.int32, x.shape[1]), hinge)
    return jax.lax.stop_gradient(x)


@MXNET.row("MakeLoss", is_loss=True)
def _make_loss(call: Call, x: Any) -> Any:
    """What it is of is minimised."""
    if call.training is not None:
        how = call.one_of("normalization", "null", *_NORMALISED)
        parts = {"null": 1, "batch": x.shape[0]}
        if how == "valid":
            parts[how] = jnp.maximum(jnp.sum(x > call.number("valid_thresh")), 1)
        total = call.number("grad_scale", 1.0) * jnp.sum(x)
        call.training.losses.append(total / jax.lax.stop_gradient(parts[how]))
    return jax.lax.stop_gradient(x)


@MXNET.row("make_loss", is_loss=True)
def _loss_of_all(call: Call, x: Any) -> Any:
    """What it is of is minimised."""
    if call.training is not None:
        call.training.losses.append(jnp.sum(x))
    return x
