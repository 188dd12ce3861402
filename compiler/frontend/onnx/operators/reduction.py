"""Reductions over axes, and what is normalised by them: softmax and its kin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.graphs.table import Call, axes_of, axis_of
from shardwright.compiler.frontend.onnx.operators.registry import ONNX

Reduce = Callable[[Any, Any, tuple[int, ...], bool], Any]
"""(library, x, axes, whether they stay) -> reduced."""


def _sum(xp: Any, x: Any, axes: tuple[int, ...], keeps: bool) -> Any:
    return xp.sum(x, axes, keepdims=keeps, dtype=x.dtype)


def _log_sum_exp(x: Any, axes: tuple[int, ...], keeps: bool) -> Any:
    return jax.nn.logsumexp(x, axes, keepdims=keeps) if axes else x


_REDUCTIONS: dict[str, Reduce] = {
    "ReduceL1": lambda xp, x, axes, keeps: _sum(xp, xp.abs(x), axes, keeps),
    "ReduceL2": lambda xp, x, axes, keeps: xp.sqrt(_sum(xp, x * x, axes, keeps)),
    "ReduceLogSum": lambda xp, x, axes, keeps: xp.log(_sum(xp, x, axes, keeps)),
    "ReduceLogSumExp": lambda _, x, axes, keeps: _log_sum_exp(x, axes, keeps),
    "ReduceMax": lambda xp, x, axes, keeps: xp.max(x, axes, keepdims=keeps),
    "ReduceMean": lambda xp, x, axes, keeps: xp.mean(x, axes, keepdims=keeps),
    "ReduceMin": lambda xp, x, axes, keeps: xp.min(x, axes, keepdims=keeps),
    "ReduceProd": lambda xp, x, axes, keeps: xp.prod(x, axes, keepdims=keeps, dtype=x.dtype),
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda xp, x, axes, keeps: _sum(xp, x * x, axes, keeps),
}
_EXTREMES = {"ReduceMax": -math.inf, "ReduceMin": math.inf}
_OPERAND_SINCE = {"ReduceSum": 13}
"""The opset from which axes are an operand; 18 of all others."""


def _reduced(call: Call, x: Any, axes: Sequence[int] | None) -> Any:
    """No axes are all, or, where the node says so, none."""
    none = () if call.integer("noop_with_empty_axes") else tuple(range(x.ndim))
    dims = axes_of(axes, x.ndim) if axes else none
    name = call.node.operator
    if name in _EXTREMES and not math.prod(x.shape):
        least = jnp.full((1,) * x.ndim, _EXTREMES[name]).astype(x.dtype)
        x = jnp.concatenate([x, jnp.broadcast_to(least, [d or 1 for d in x.shape])], dims[0])
    return _REDUCTIONS[name](call.xp, x, dims, bool(call.integer("keepdims", 1)))


def _of_operand(call: Call, x: Any, axes: Any = None) -> Any:
    return _reduced(call, x, None if axes is None else axes.tolist())


def _of_attributes(call: Call, x: Any) -> Any:
    return _reduced(call, x, call.ints("axes"))


for _name in _REDUCTIONS:
    _folds = _name != "ReduceLogSumExp"
    ONNX.row(_name, folds=_folds)(_of_attributes)
    ONNX.row(_name, since=_OPERAND_SINCE.get(_name, 18), static=(1,), folds=_folds)(_of_operand)


def _hardmax(x: Any, axis: int) -> Any:
    """1 at the first of the largest elements, 0 elsewhere."""
    return jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], dtype=x.dtype, axis=axis)


_ALONG: dict[str, Callable[[Any, int], Any]] = {
    "Hardmax": _hardmax,
    "LogSoftmax": jax.nn.log_softmax,
    "Softmax": jax.nn.softmax,
}


def _along(call: Call, x: Any) -> Any:
    return _ALONG[call.node.operator](x, axis_of(call.integer("axis", -1), x.ndim))


def _along_rest(call: Call, x: Any) -> Any:
    """Over all dims from the axis on, as one."""
    axis = call.integer("axis", 1)
    flat = x.reshape(math.prod(x.shape[: axis_of(axis, x.ndim)]), -1)
    return _ALONG[call.node.operator](flat, 1).reshape(x.shape)


ONNX.row(*_ALONG)(_along_rest)
ONNX.row(*_ALONG, since=13)(_along)
