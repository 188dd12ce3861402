"""Operators that compute every element by itself, and types."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call
from shardwright.compiler.frontend.graphs.types import computed_type
from shardwright.compiler.frontend.onnx.operators.registry import ONNX
from shardwright.compiler.frontend.onnx.tensors import type_of


def _of(name: str) -> Callable[..., Any]:
    """A row that is a function of the same name in both libraries."""

    def row(call: Call, *operands: Any) -> Any:
        return getattr(call.xp, name)(*operands)

    return row


_BOTH = {
    "Abs": "abs",
    "Acos": "arccos",
    "Acosh": "arccosh",
    "Add": "add",
    "Asin": "arcsin",
    "Asinh": "arcsinh",
    "Atan": "arctan",
    "Atanh": "arctanh",
    "BitwiseAnd": "bitwise_and",
    "BitwiseNot": "invert",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Ceil": "ceil",
    "Cos": "cos",
    "Cosh": "cosh",
    "Exp": "exp",
    "Floor": "floor",
    "Log": "log",
    "Mul": "multiply",
    "Neg": "negative",
    "Reciprocal": "reciprocal",
    "Round": "round",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Sqrt": "sqrt",
    "Sub": "subtract",
    "Tan": "tan",
    "Tanh": "tanh",
}
_JUDGING = {
    "And": "logical_and",
    "Equal": "equal",
    "Greater": "greater",
    "IsNaN": "isnan",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Not": "logical_not",
    "Or": "logical_or",
    "Xor": "logical_xor",
}
ONNX.rows({name: _of(own) for name, own in _BOTH.items()}, folds=True)
ONNX.rows({name: _of(own) for name, own in _JUDGING.items()}, folds=True, has_own_type=True)


@ONNX.row("IsInf", folds=True, has_own_type=True)
def _is_inf(call: Call, x: Any) -> Any:
    below, above = call.integer("detect_negative", 1), call.integer("detect_positive", 1)
    return call.xp.isinf(x) & (((x < 0) & bool(below)) | ((x > 0) & bool(above)))


@ONNX.row("Div", folds=True)
def _div(call: Call, a: Any, b: Any) -> Any:
    """Whole numbers are rounded towards zero."""
    xp = call.xp
    if a.dtype.kind in "iu":
        if xp is jnp:
            return jax.lax.div(*jnp.broadcast_arrays(jnp.asarray(a), jnp.asarray(b)))
        return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
    return xp.divide(a, b)


@ONNX.row("Mod", folds=True)
def _mod(call: Call, a: Any, b: Any) -> Any:
    return call.xp.fmod(a, b) if call.integer("fmod") else call.xp.mod(a, b)


MOST_MULTIPLIED = 8
"""The largest whole power that is written as products (our choice)."""


@ONNX.row("Pow", folds=True)
def _pow(call: Call, a: Any, b: Any) -> Any:
    if call.xp is jnp and isinstance(b, np.ndarray) and b.size == 1 and b.ndim <= a.ndim:
        power = float(b.reshape(()))
        if power.is_integer() and abs(power) <= MOST_MULTIPLIED and a.dtype.kind != "i":
            return jax.lax.integer_pow(a, int(power))
        if power == 0.5:
            return jnp.sqrt(a)
    wide = a if a.dtype.kind not in "iu" or b.dtype.kind in "iu" else a.astype(b.dtype)
    return call.xp.power(wide, b if wide.dtype.kind in "iu" else b.astype(wide.dtype))


@ONNX.row("BitShift", folds=True)
def _bit_shift(call: Call, a: Any, b: Any) -> Any:
    way = call.one_of("direction", "", "LEFT", "RIGHT")
    return call.xp.left_shift(a, b) if way == "LEFT" else call.xp.right_shift(a, b)


def _joined(name: str) -> Callable[..., Any]:
    """A row of any number of operands."""

    def row(call: Call, *operands: Any) -> Any:
        return functools.reduce(getattr(call.xp, name), operands)

    return row


ONNX.rows({"Max": _joined("maximum"), "Min": _joined("minimum"), "Sum": _joined("add")}, folds=True)


@ONNX.row("Mean")
def _mean(call: Call, *operands: Any) -> Any:
    return functools.reduce(jnp.add, operands) / len(operands)


@ONNX.row("Where", folds=True, has_own_type=True)
def _where(call: Call, condition: Any, x: Any, y: Any) -> Any:
    return call.xp.where(condition, x, y)


@ONNX.row("Clip", since=11, folds=True)
def _clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else call.xp.maximum(x, low)
    return x if high is None else call.xp.minimum(x, high)


@ONNX.row("Clip", since=6)
def _clip_of_attributes(call: Call, x: Any) -> Any:
    return jnp.clip(x, call.number("min", -math.inf), call.number("max", math.inf))


@ONNX.row("Identity", folds=True)
def _identity(call: Call, x: Any) -> Any:
    return x


@ONNX.row("Dropout", static=(1, 2), has_own_type=True)
def _dropout(call: Call, x: Any, _: Any = None, training: Any = None) -> Any:
    """What inference makes of it: nothing."""
    if training is not None and training.any():
        raise NotImplementedError("training_mode, which draws random numbers")
    return (x, jnp.ones(x.shape, bool))[: call.count] if call.count > 1 else x


ONNX.rows(
    {
        "Erf": lambda _, x: jax.scipy.special.erf(x),
        "HardSwish": lambda _, x: x * jnp.clip(x / 6 + 0.5, 0, 1),
        "Mish": lambda _, x: x * jnp.tanh(jax.nn.softplus(x)),
        "PRelu": lambda _, x, slope: jnp.where(x < 0, slope * x, x),
        "Relu": lambda _, x: jnp.maximum(x, jnp.zeros((), x.dtype)),
        "Sigmoid": lambda _, x: jax.nn.sigmoid(x),
        "Softplus": lambda _, x: jax.nn.softplus(x),
        "Softsign": lambda _, x: x / (1 + jnp.abs(x)),
    }
)


@ONNX.row("Celu")
def _celu(call: Call, x: Any) -> Any:
    alpha = call.number("alpha", 1.0)
    return jnp.maximum(x, 0) + jnp.minimum(alpha * jnp.expm1(jnp.minimum(x, 0) / alpha), 0)


@ONNX.row("Elu")
def _elu(call: Call, x: Any) -> Any:
    return jax.nn.elu(x, call.number("alpha", 1.0))


@ONNX.row("Selu")
def _selu(call: Call, x: Any) -> Any:
    """Source: the defaults of the operator's page."""
    alpha, gamma = call.number("alpha", 1.67326319), call.number("gamma", 1.05070102)
    return gamma * jax.nn.elu(x, alpha)


@ONNX.row("Gelu")
def _gelu(call: Call, x: Any) -> Any:
    return jax.nn.gelu(x, call.one_of("approximate", "none", "none", "tanh") == "tanh")


@ONNX.row("HardSigmoid")
def _hard_sigmoid(call: Call, x: Any) -> Any:
    return jnp.clip(call.number("alpha", 0.2) * x + call.number("beta", 0.5), 0, 1)


@ONNX.row("LeakyRelu")
def _leaky_relu(call: Call, x: Any) -> Any:
    return jnp.where(x < 0, call.number("alpha", 0.01) * x, x)


@ONNX.row("ThresholdedRelu")
def _thresholded_relu(call: Call, x: Any) -> Any:
    return jnp.where(x > call.number("alpha", 1.0), x, 0)


@ONNX.row("Shrink")
def _shrink(call: Call, x: Any) -> Any:
    bias, reach = call.number("bias"), call.number("lambd", 0.5)
    return jnp.where(x < -reach, x + bias, jnp.where(x > reach, x - bias, 0))


@ONNX.row("Cast", folds=True, has_own_type=True)
def _cast(call: Call, x: Any) -> Any:
    return cast(call, x, type_of(call.integer("to"), "Cast"))


@ONNX.row("CastLike", folds=True, has_own_type=True)
def _cast_like(call: Call, x: Any, like: Any) -> Any:
    return cast(call, x, like.dtype)


_SATURATING = ("float8_e4m3fn", "float8_e5m2")


def cast(call: Call, x: Any, dtype: np.dtype[Any]) -> Any:
    """x in another type. fp8 saturates where the node says so, which it does unless it says
    otherwise."""
    if dtype.name.endswith("int4"):
        raise unfit("a type of 8 bits or more", dtype.name)
    if dtype.name in _SATURATING and call.integer("saturate", 1):
        most = float(jnp.finfo(dtype).max)
        x = call.xp.clip(x.astype(np.float32), -most, most)
    if dtype.kind == "b":
        return x != 0
    return x.astype(dtype if call.xp is np else computed_type(dtype))
