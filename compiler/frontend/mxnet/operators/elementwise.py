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
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET, dtype_of

Formula = Callable[..., Any]


def _of(name: str) -> Formula:
    """A row that is a function of the same name in both libraries."""

    def row(call: Call, x: Any) -> Any:
        return getattr(call.xp, name)(x)

    return row


_SAME = (
    *("abs", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "cbrt", "ceil", "cos"),
    *("cosh", "degrees", "exp", "expm1", "floor", "log", "log10", "log1p", "log2", "negative"),
    *("radians", "reciprocal", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc"),
)
MXNET.rows({name: _of(name) for name in _SAME}, folds=True)
MXNET.row("fix", folds=True)(_of("trunc"))
MXNET.row("logical_not", folds=True)(_of("logical_not"))


def _gelu(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)


def _relu(x: Any) -> Any:
    return jnp.maximum(x, jnp.zeros((), x.dtype))


def _rounded(call: Call, x: Any) -> Any:
    """Halves away from zero."""
    return call.xp.sign(x) * call.xp.floor(call.xp.abs(x) + 0.5)


def _nearest(call: Call, x: Any) -> Any:
    """Halves to the lower neighbour."""
    return call.xp.ceil(x - 0.5)


MXNET.rows({"round": _rounded, "rint": _nearest}, folds=True)
MXNET.rows(
    {
        "erf": lambda _, x: jax.scipy.special.erf(x),
        "erfinv": lambda _, x: jax.scipy.special.erfinv(x),
        "gamma": lambda _, x: jnp.exp(jax.scipy.special.gammaln(x)) * _gamma_sign(x),
        "gammaln": lambda _, x: jax.scipy.special.gammaln(x),
        "rcbrt": lambda _, x: 1 / jnp.cbrt(x),
        "relu": lambda _, x: _relu(x),
        "rsqrt": lambda _, x: jax.lax.rsqrt(x),
        "sigmoid": lambda _, x: jax.nn.sigmoid(x),
        "softsign": lambda _, x: x / (1 + jnp.abs(x)),
        "_contrib_div_sqrt_dim": lambda _, x: x / math.sqrt(x.shape[-1]),
    }
)
MXNET.row("_copy", "identity", "_identity_with_attr_like_rhs", folds=True)(lambda _, x, *rest: x)
MXNET.row("BlockGrad", "stop_gradient")(lambda _, x: jax.lax.stop_gradient(x))


def _gamma_sign(x: Any) -> Any:
    """The sign of the gamma function."""
    return jnp.where((x < 0) & (jnp.floor(x) % 2 != 0), -1.0, 1.0)


@MXNET.row("hard_sigmoid")
def _hard_sigmoid(call: Call, x: Any) -> Any:
    return jnp.clip(call.number("alpha", 0.2) * x + call.number("beta", 0.5), 0, 1)


@MXNET.row("_contrib_quadratic")
def _quadratic(call: Call, x: Any) -> Any:
    return call.number("a") * x * x + call.number("b") * x + call.number("c")


@MXNET.row("smooth_l1")
def _smooth_l1(call: Call, x: Any) -> Any:
    by = call.number("scalar", 1.0) ** 2
    return jnp.where(jnp.abs(x) < 1 / by, 0.5 * by * x * x, jnp.abs(x) - 0.5 / by)


@MXNET.row("clip", folds=True)
def _clip(call: Call, x: Any) -> Any:
    low, high = call.number("a_min", -math.inf), call.number("a_max", math.inf)
    return call.xp.minimum(call.xp.maximum(x, low), high)


_ACTIVATIONS: dict[str, Formula] = {
    "relu": _relu,
    "sigmoid": jax.nn.sigmoid,
    "softrelu": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
    "tanh": jnp.tanh,
}


@MXNET.row("Activation")
def _activation(call: Call, x: Any) -> Any:
    return _ACTIVATIONS[call.one_of("act_type", "", *_ACTIVATIONS)](x)


def _selu(x: Any) -> Any:
    """Source: the constants of the operator's page."""
    return 1.0507009873554804934193349852946 * jax.nn.elu(x, 1.6732632423543772848170429916717)


_RECTIFIERS = ("leaky", "elu", "gelu", "prelu", "rrelu", "selu")


@MXNET.row("LeakyReLU")
def _leaky_relu(call: Call, x: Any, slopes: Any = None) -> Any:
    """A random slope is the mean of its bounds, as inference has it."""
    kind, slope = call.one_of("act_type", "leaky", *_RECTIFIERS), call.number("slope", 0.25)
    if kind in ("gelu", "selu"):
        return _gelu(x) if kind == "gelu" else _selu(x)
    if kind == "elu":
        return jax.nn.elu(x, slope)
    if kind == "prelu":
        if slopes is None:
            raise unfit("slopes as an operand of prelu", "none")
        one = slopes.ndim == 1 and x.ndim > 1 and slopes.size > 1
        slope = slopes.reshape(1, -1, *[1] * (x.ndim - 2)) if one else slopes
    if kind == "rrelu":
        slope = (call.number("lower_bound", 0.125) + call.number("upper_bound", 0.334)) / 2
    return jnp.where(x > 0, x, slope * x)


MOST_MULTIPLIED = 8
"""The largest whole power that is written as products (our choice)."""


def _power(call: Call, a: Any, b: Any) -> Any:
    if call.xp is jnp and isinstance(b, np.ndarray) and not b.ndim:
        power = float(b)
        if power.is_integer() and abs(power) <= MOST_MULTIPLIED and a.dtype.kind != "i":
            return jax.lax.integer_pow(a, int(power))
    return call.xp.power(a, b)


def _divided(call: Call, a: Any, b: Any) -> Any:
    """Whole numbers are rounded towards zero."""
    return call.xp.trunc(call.xp.true_divide(a, b)) if a.dtype.kind in "iu" else a / b


def _both(name: str) -> Formula:
    return lambda call, a, b: getattr(call.xp, name)(a, b)


def _back(formula: Formula) -> Formula:
    """With operands in the other order."""
    return lambda call, a, b: formula(call, b, a)


_BINARY: dict[str, Formula] = {
    "add": _both("add"),
    "sub": _both("subtract"),
    "mul": _both("multiply"),
    "div": _divided,
    "mod": _both("mod"),
    "power": _power,
    "maximum": _both("maximum"),
    "minimum": _both("minimum"),
    "hypot": _both("hypot"),
    "equal": _both("equal"),
    "not_equal": _both("not_equal"),
    "greater": _both("greater"),
    "greater_equal": _both("greater_equal"),
    "lesser": _both("less"),
    "lesser_equal": _both("less_equal"),
    "logical_and": _both("logical_and"),
    "logical_or": _both("logical_or"),
    "logical_xor": _both("logical_xor"),
}
"""What operators of two operands compute, by the name that all of them have in common."""
_NAMES = {
    "add": "elemwise_add broadcast_add broadcast_plus _plus _add _Plus _grad_add",
    "sub": "elemwise_sub broadcast_sub broadcast_minus _minus _sub _Minus",
    "mul": "elemwise_mul broadcast_mul _mul _Mul",
    "div": "elemwise_div broadcast_div _div _Div",
    "mod": "broadcast_mod _mod _Mod",
    "power": "broadcast_power _power _Power",
    "maximum": "broadcast_maximum _maximum _Maximum",
    "minimum": "broadcast_minimum _minimum _Minimum",
    "hypot": "broadcast_hypot _hypot _Hypot",
    "equal": "broadcast_equal _equal _Equal",
    "not_equal": "broadcast_not_equal _not_equal _Not_Equal",
    "greater": "broadcast_greater _greater _Greater",
    "greater_equal": "broadcast_greater_equal _greater_equal _Greater_Equal",
    "lesser": "broadcast_lesser _lesser _Lesser",
    "lesser_equal": "broadcast_lesser_equal _lesser_equal _Lesser_Equal",
    "logical_and": "broadcast_logical_and _logical_and _Logical_And",
    "logical_or": "broadcast_logical_or _logical_or _Logical_Or",
    "logical_xor": "broadcast_logical_xor _logical_xor _Logical_Xor",
}
for _kind, _names in _NAMES.items():
    MXNET.row(*_names.split(), folds=True)(_BINARY[_kind])

_SCALAR_NAMES = {
    "add": "_plus_scalar _PlusScalar _scatter_plus_scalar __add_scalar__",
    "sub": "_minus_scalar _MinusScalar _scatter_minus_scalar __sub_scalar__",
    "rsub": "_rminus_scalar _RMinusScalar __rsub_scalar__",
    "mul": "_mul_scalar _MulScalar __mul_scalar__",
    "div": "_div_scalar _DivScalar __div_scalar__",
    "rdiv": "_rdiv_scalar _RDivScalar __rdiv_scalar__",
    "mod": "_mod_scalar _ModScalar",
    "rmod": "_rmod_scalar _RModScalar",
    "power": "_power_scalar _PowerScalar __pow_scalar__",
    "rpower": "_rpower_scalar _RPowerScalar __rpow_scalar__",
    "maximum": "_maximum_scalar _MaximumScalar",
    "minimum": "_minimum_scalar _MinimumScalar",
    "hypot": "_hypot_scalar _HypotScalar",
    "equal": "_equal_scalar _EqualScalar",
    "not_equal": "_not_equal_scalar _NotEqualScalar",
    "greater": "_greater_scalar _GreaterScalar",
    "greater_equal": "_greater_equal_scalar _GreaterEqualScalar",
    "lesser": "_lesser_scalar _LesserScalar",
    "lesser_equal": "_lesser_equal_scalar _LesserEqualScalar",
    "logical_and": "_logical_and_scalar _LogicalAndScalar",
    "logical_or": "_logical_or_scalar _LogicalOrScalar",
    "logical_xor": "_logical_xor_scalar _LogicalXorScalar",
}


def _with_scalar(formula: Formula) -> Formula:
    """The same with a number among the attributes as the second operand, in the type of x."""

    def row(call: Call, x: Any) -> Any:
        number = call.number("scalar", 1.0)
        if x.dtype.kind in "iu" and not number.is_integer():
            raise NotImplementedError(f"a whole number with {number}")
        return formula(call, x, np.asarray(number, x.dtype))

    return row


for _kind, _names in _SCALAR_NAMES.items():
    _formula = _BINARY[_kind] if _kind in _BINARY else _back(_BINARY[_kind[1:]])
    MXNET.row(*_names.split(), folds=True)(_with_scalar(_formula))


@MXNET.row("add_n", "ElementWiseSum", folds=True)
def _sum_of_all(call: Call, *operands: Any) -> Any:
    return functools.reduce(call.xp.add, operands)


@MXNET.row("where", has_own_type=True)
def _where(call: Call, condition: Any, x: Any, y: Any) -> Any:
    """A condition of one dim chooses rows."""
    if condition.ndim == 1 and x.ndim > 1:
        condition = condition.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(condition != 0, x, y)


@MXNET.row("Cast", "cast", "amp_cast", folds=True, has_own_type=True)
def _cast(call: Call, x: Any) -> Any:
    return x.astype(dtype_of(call, "dtype", np.float32))


@MXNET.row("amp_multicast", has_own_type=True)
def _cast_together(call: Call, *operands: Any) -> Any:
    """All in the widest type of floating point among them, or in the narrowest."""
    sizes = [x.dtype for x in operands if x.dtype.kind not in "biu"]
    choose = min if call.flag("cast_narrow") else max
    to = choose(sizes, key=lambda dtype: dtype.itemsize) if sizes else operands[0].dtype
    return tuple(x.astype(to) if x.dtype.kind not in "biu" else x for x in operands)


@MXNET.row("Dropout")
def _dropout(call: Call, x: Any) -> Any:
    """What inference makes of it: nothing."""
    if call.one_of("mode", "training", "training", "always") == "always":
        raise NotImplementedError("mode always, which draws random numbers")
    return (x, jnp.ones(x.shape, x.dtype))[: call.count] if call.count > 1 else x
