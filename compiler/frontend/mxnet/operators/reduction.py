"""Reductions over axes, the order of elements, and what is normalised along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call, axis_of
from shardwright.compiler.frontend.mxnet.operators.registry import (
    MXNET,
    dtype_of,
    reduced_axes,
)

Reduce = Callable[..., Any]


def _shaped(x: Any) -> Any:
    """A result of all elements has one dim."""
    return x if x.ndim else x.reshape(1)


def _reduction(reduce: Reduce) -> Reduce:
    def row(call: Call, x: Any) -> Any:
        axes = reduced_axes(call, x.ndim)
        return _shaped(reduce(call.xp, x, axes, keepdims=call.flag("keepdims")))

    return row


def _known(xp: Any, x: Any) -> Any:
    return xp.where(xp.isnan(x), 0, x)


_REDUCTIONS: dict[str, tuple[str, Reduce]] = {
    "sum": ("sum sum_axis", lambda xp, x, axes, **k: xp.sum(x, axes, dtype=x.dtype, **k)),
    "mean": ("mean", lambda xp, x, axes, **k: xp.mean(x, axes, **k)),
    "prod": ("prod", lambda xp, x, axes, **k: xp.prod(x, axes, dtype=x.dtype, **k)),
    "max": ("max max_axis", lambda xp, x, axes, **k: xp.max(x, axes, **k)),
    "min": ("min min_axis", lambda xp, x, axes, **k: xp.min(x, axes, **k)),
    "nansum": ("nansum", lambda xp, x, axes, **k: xp.sum(_known(xp, x), axes, **k)),
    "nanprod": (
        "nanprod",
        lambda xp, x, axes, **k: xp.prod(xp.where(xp.isnan(x), 1, x), axes, **k),
    ),
}
for _names, _reduce in _REDUCTIONS.values():
    MXNET.row(*_names.split(), folds=True)(_reduction(_reduce))


@MXNET.row("norm")
def _norm(call: Call, x: Any) -> Any:
    axes, keeps = reduced_axes(call, x.ndim), call.flag("keepdims")
    if call.integer("ord", 2) == 1:
        return _shaped(jnp.sum(jnp.abs(x), axes, keepdims=keeps))
    return _shaped(jnp.sqrt(jnp.sum(x * x, axes, keepdims=keeps)))


@MXNET.row("cumsum")
def _cumsum(call: Call, x: Any) -> Any:
    axis = call.node.attributes.get("axis")
    found = jnp.cumsum(x.reshape(-1) if axis is None else x, 0 if axis is None else axis)
    return found.astype(dtype_of(call, "dtype", x.dtype))


def _argument(find: Callable[..., Any]) -> Reduce:
    """The place of the first of the largest or smallest elements, as a number of fp32."""

    def row(call: Call, x: Any) -> Any:
        axis, keeps = call.node.attributes.get("axis"), call.flag("keepdims")
        place = None if axis is None else axis_of(axis, x.ndim)
        return _shaped(find(x, place, keepdims=keeps)).astype(jnp.float32)

    return row


MXNET.rows({"argmax": _argument(jnp.argmax), "argmin": _argument(jnp.argmin)}, has_own_type=True)


@MXNET.row("argmax_channel", has_own_type=True)
def _argmax_channel(call: Call, x: Any) -> Any:
    return jnp.argmax(x, 1).astype(jnp.float32)


def _ordered(call: Call, x: Any, ascends: bool, axis: int | None) -> tuple[Any, Any, int]:
    """(values, places, axis) in order along an axis, or of all elements; equal ones as they
    stand."""
    rows, place = (x.reshape(-1), 0) if axis is None else (x, axis_of(axis, x.ndim))
    places = jnp.argsort(rows if ascends else -rows, place, stable=True)
    return jnp.take_along_axis(rows, places, place), places, place


def _axis(call: Call) -> int | None:
    """The axis of an order; a node that says None means all elements, one that says nothing the
    last axis."""
    said: int | None = call.node.attributes.get("axis", -1)
    return said


@MXNET.row("sort")
def _sort(call: Call, x: Any) -> Any:
    return _ordered(call, x, call.flag("is_ascend", True), _axis(call))[0]


@MXNET.row("argsort", has_own_type=True)
def _argsort(call: Call, x: Any) -> Any:
    places = _ordered(call, x, call.flag("is_ascend", True), _axis(call))[1]
    return places.astype(dtype_of(call, "dtype", np.float32))


_RETURNED = ("value", "indices", "mask", "both")


@MXNET.row("topk", has_own_type=True)
def _top_k(call: Call, x: Any) -> Any:
    how = call.one_of("ret_typ", "indices", *_RETURNED)
    x = x.reshape(-1) if _axis(call) is None else x
    axis, ascends = axis_of(call.integer("axis", -1), x.ndim), call.flag("is_ascend")
    count = call.integer("k", 1)
    if not 0 <= count <= x.shape[axis]:
        raise unfit(f"k from 0 to {x.shape[axis]}", str(count))
    rows = jnp.moveaxis(x, axis, -1)
    values, places = jax.lax.top_k(-rows if ascends else rows, count or x.shape[axis])
    values = -values if ascends else values
    if how == "mask":
        hot = jnp.sum(jax.nn.one_hot(places, x.shape[axis], dtype=x.dtype), -2)
        return jnp.moveaxis(hot, -1, axis)
    dtype = dtype_of(call, "dtype", np.float32)
    found = jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis).astype(dtype)
    return found if how == "both" else found[how == "indices"]


def _heated(call: Call, x: Any, length: Any, sign: float) -> tuple[Any, int]:
    """(x by a temperature, with places behind a length left out; the axis)."""
    axis = axis_of(call.integer("axis", -1), x.ndim)
    x = sign * x / call.number("temperature", 1.0)
    if length is not None:
        count = jnp.expand_dims(jnp.asarray(length), axis).astype(jnp.int32)
        places = jnp.arange(x.shape[axis]).reshape([-1 if n == axis else 1 for n in range(x.ndim)])
        x = jnp.where(places < count, x, -jnp.inf)
    return x, axis


def _softmax_of(sign: float) -> Reduce:
    def row(call: Call, x: Any, length: Any = None) -> Any:
        heated, axis = _heated(call, x, length, sign)
        found = jax.nn.softmax(heated, axis)
        found = found if length is None else jnp.where(jnp.isnan(found), 0, found)
        return found.astype(dtype_of(call, "dtype", x.dtype))

    return row


MXNET.rows({"softmax": _softmax_of(1.0), "softmin": _softmax_of(-1.0)}, has_own_type=True)


@MXNET.row("log_softmax", has_own_type=True)
def _log_softmax(call: Call, x: Any) -> Any:
    heated, axis = _heated(call, x, None, 1.0)
    return jax.nn.log_softmax(heated, axis).astype(dtype_of(call, "dtype", x.dtype))


@MXNET.row("SoftmaxActivation")
def _softmax_activation(call: Call, x: Any) -> Any:
    if call.one_of("mode", "instance", "instance", "channel") == "channel":
        return jax.nn.softmax(x, 1)
    return jax.nn.softmax(x.reshape(x.shape[0], -1), 1).reshape(x.shape)


_OVER: dict[str, Callable[[int], tuple[int, ...]]] = {
    "instance": lambda rank: tuple(range(1, rank)),
    "channel": lambda rank: (1,),
    "spatial": lambda rank: tuple(range(2, rank)),
}


@MXNET.row("L2Normalization")
def _l2_normalization(call: Call, x: Any) -> Any:
    axes = _OVER[call.one_of("mode", "instance", *_OVER)](x.ndim)
    squares = jnp.sum(x * x, axes, keepdims=True)
    return x / jnp.sqrt(squares + call.number("eps", 1e-10))


@MXNET.row("softmax_cross_entropy")
def _softmax_cross_entropy(call: Call, x: Any, label: Any) -> Any:
    """The sum over samples."""
    logs = jax.nn.log_softmax(x, -1)
    own = jnp.take_along_axis(logs, label.astype(jnp.int32)[:, None], 1, mode="clip")
    return -jnp.sum(own).reshape(1)
