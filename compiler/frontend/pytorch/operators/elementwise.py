"""Operators of single elements: arithmetic, comparisons, activations, types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.operators.gradients import (
    absolute,
    between,
    with_slope,
)
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, Place
from shardwright.compiler.frontend.pytorch.types import scalar


def trigamma(x: Any) -> Any:
    """The second derivative of the logarithm of gamma; JAX has it of positive numbers, those below
    1/2 are mirrored: trigamma(x) + trigamma(1 - x) = (pi / sin(pi x))^2."""
    is_low = x < 0.5
    found = special.polygamma(1, jnp.where(is_low, 1 - x, x))
    return jnp.where(is_low, jnp.square(jnp.pi / jnp.sin(jnp.pi * x)) - found, found)


digamma = with_slope(special.digamma, trigamma)

ATEN.rows(
    {
        "abs": absolute,
        "i0": with_slope(special.i0, special.i1),
        "neg": jnp.negative,
        "sign": jnp.sign,
        "sgn": jnp.sign,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log2": jnp.log2,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "sqrt": jnp.sqrt,
        "rsqrt": jax.lax.rsqrt,
        "reciprocal": jnp.reciprocal,
        "square": jnp.square,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "asin": jnp.arcsin,
        "acos": jnp.arccos,
        "atan": jnp.arctan,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "tanh": jnp.tanh,
        "asinh": jnp.arcsinh,
        "acosh": jnp.arccosh,
        "atanh": jnp.arctanh,
        "erf": special.erf,
        "erfc": special.erfc,
        "erfinv": special.erfinv,
        "lgamma": special.gammaln,
        "digamma": digamma,
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "round": jnp.round,
        "trunc": jnp.trunc,
        "frac": lambda x: x - jnp.trunc(x),
        "sigmoid": jax.nn.sigmoid,
        "log_sigmoid": jax.nn.log_sigmoid,
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "mish": jax.nn.mish,
        "selu": jax.nn.selu,
        "isnan": jnp.isnan,
        "isinf": jnp.isinf,
        "logical_not": jnp.logical_not,
        "bitwise_not": jnp.bitwise_not,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_xor": jnp.logical_xor,
        "where.self": jnp.where,
        "where.ScalarSelf": jnp.where,
        "where.ScalarOther": jnp.where,
        "where.Scalar": jnp.where,
        "clone": lambda x: x,
        "contiguous": lambda x: x,
        "alias": lambda x: x,
        "lift_fresh_copy": lambda x: x,
        "detach": jax.lax.stop_gradient,
        "hypot": jnp.hypot,
        "nextafter": jnp.nextafter,
        "signbit": jnp.signbit,
        "logaddexp": jnp.logaddexp,
        "logaddexp2": jnp.logaddexp2,
        "sinc": jnp.sinc,
        "rad2deg": jnp.rad2deg,
        "deg2rad": jnp.deg2rad,
        "isposinf": jnp.isposinf,
        "isneginf": jnp.isneginf,
        "isfinite": jnp.isfinite,
        "gcd": jnp.gcd,
        "lcm": jnp.lcm,
        "special_entr": special.entr,
        "special_ndtr": special.ndtr,
        "special_ndtri": special.ndtri,
        "special_log_ndtr": special.log_ndtr,
        "special_i0e": special.i0e,
        "special_i1": special.i1,
        "special_i1e": special.i1e,
        "special_zeta": special.zeta,
        "igamma": special.gammainc,
        "igammac": special.gammaincc,
    }
)

_BINARY = {
    "mul": jnp.multiply,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "remainder": jnp.remainder,
    "fmod": jnp.fmod,
    "floor_divide": jnp.floor_divide,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
}
"""Operators of two tensors, or of one and a number."""


def _binary(function: Any) -> Any:
    return lambda x, y: function(scalar(x), scalar(y))


for _name, _function in _BINARY.items():
    ATEN.add(f"{_name}.Tensor" if _name != "floor_divide" else _name, _binary(_function))
    ATEN.add(f"{_name}.Scalar", _binary(_function))


@ATEN.row("add.Tensor", "add.Scalar")
def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha y."""
    return jnp.add(scalar(x), scalar(y) if alpha == 1 else scalar(y) * alpha)


@ATEN.row("sub.Tensor", "sub.Scalar")
def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    """x - alpha y."""
    return jnp.subtract(scalar(x), scalar(y) if alpha == 1 else scalar(y) * alpha)


@ATEN.row("rsub.Tensor", "rsub.Scalar")
def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    """y - alpha x."""
    return sub(y, x, alpha)


@ATEN.row("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor")
def div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """x / y, rounded where asked: whole numbers as such, which fp32 may not hold."""
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    x, y = (jnp.asarray(scalar(part)) for part in (x, y))
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    kind = jnp.result_type(x, y)
    if jnp.issubdtype(kind, jnp.integer):
        return jax.lax.div(*jnp.broadcast_arrays(x.astype(kind), y.astype(kind)))
    return jnp.trunc(jnp.true_divide(x, y))


@ATEN.row("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def power(x: Any, y: Any) -> Any:
    """x to the power of y; a whole one by multiplication."""
    if isinstance(y, float) and y.is_integer():
        y = int(y)
    return jnp.power(x, y)


@ATEN.row("addcmul")
def addcmul(x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    """x + value a b."""
    return x + value * a * b


@ATEN.row("addcdiv")
def addcdiv(x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    """x + value a / b."""
    return x + value * a / b


@ATEN.row("lerp.Scalar", "lerp.Tensor")
def lerp(x: Any, y: Any, weight: Any) -> Any:
    """x + weight (y - x)."""
    return x + weight * (y - x)


@ATEN.row("clamp", "clamp.Tensor", "clip")
def clamp(x: Any, min: Any = None, max: Any = None) -> Any:  # torch's names
    """x, at least min and at most max; at a bound the gradient is that of x."""
    low, high = scalar(min), scalar(max)
    if all(part is None or isinstance(part, int | float) for part in (low, high)):
        return between(x, low, high, lambda x: _is_within(x, low, high))
    if low is not None:
        x = jnp.where((x >= low) | jnp.isnan(x), x, low)
    return x if high is None else jnp.where((x <= high) | jnp.isnan(x), x, high)


def _is_within(x: Any, low: Any, high: Any) -> Any:
    above = True if low is None else x >= low
    return above & (True if high is None else x <= high)


@ATEN.row("clamp_min", "clamp_min.Tensor")
def clamp_min(x: Any, low: Any) -> Any:
    """x, at least low."""
    return clamp(x, low)


@ATEN.row("clamp_max", "clamp_max.Tensor")
def clamp_max(x: Any, high: Any) -> Any:
    """x, at most high."""
    return clamp(x, None, high)


@ATEN.row("hardtanh")
def hardtanh(x: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    """x between two numbers, without a gradient at them."""
    return between(x, min_val, max_val, lambda x: (x > min_val) & (x < max_val))


@ATEN.row("relu6")
def relu6(x: Any) -> Any:
    """x between 0 and 6."""
    return hardtanh(x, 0, 6)


@ATEN.row("hardsigmoid")
def hardsigmoid(x: Any) -> Any:
    """(x + 3) / 6 between 0 and 1."""
    return relu6(x + 3) / 6


@ATEN.row("hardswish")
def hardswish(x: Any) -> Any:
    """x times its hard sigmoid."""
    return x * relu6(x + 3) / 6


@ATEN.row("gelu")
def gelu(x: Any, approximate: str = "none") -> Any:
    """Gaussian error linear unit, by erf or by tanh."""
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@ATEN.row("leaky_relu")
def leaky_relu(x: Any, negative_slope: Any = 0.01) -> Any:
    """x, or negative_slope x where x is negative."""
    return jnp.where(x > 0, x, x * negative_slope)


@ATEN.row("prelu")
def prelu(x: Any, weight: Any) -> Any:
    """x, or weight x where x is negative; weight [1] or [C] along dim 1."""
    shape = (1, -1, *[1] * (x.ndim - 2)) if weight.size > 1 else ()
    weight = weight.reshape(shape)
    return jnp.where(x > 0, x, weight * x)


@ATEN.row("elu")
def elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    """Exponential linear unit."""
    low = jnp.where(x > 0, 0, x)  # so that nothing overflows on the side that is not taken
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(input_scale * low))


@ATEN.row("softplus")
def softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    """log(1 + exp(beta x)) / beta; x itself where beta x is above the threshold."""
    low = jnp.where(beta * x > threshold, 0, x)
    return jnp.where(beta * x > threshold, x, jnp.logaddexp(beta * low, 0.0) / beta)


@ATEN.row("glu")
def glu(x: Any, dim: int = -1) -> Any:
    """The first half along dim, times the sigmoid of the second."""
    return jax.nn.glu(x, dim)


@ATEN.row("threshold")
def threshold(x: Any, threshold: Any, value: Any) -> Any:
    """x where it is above a threshold, else a value."""
    return jnp.where(x > threshold, x, value)


@ATEN.row("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    """value where mask, else x."""
    return jnp.where(mask, jnp.asarray(scalar(value), x.dtype), x)


@ATEN.row("fill.Scalar", "fill.Tensor")
def fill(x: Any, value: Any) -> Any:
    """value everywhere."""
    return jnp.full(x.shape, scalar(value), x.dtype)


@ATEN.row("copy")
def copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """source in the shape and type of x."""
    return jnp.broadcast_to(source, x.shape).astype(x.dtype)


@ATEN.row("nan_to_num")
def nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """Numbers in place of NaN and infinities."""
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@ATEN.row("to.dtype", "_to_copy", "to.dtype_layout", "to.device", "to.other", placed=True)
def to(place: Place, x: Any, *_: Any, **__: Any) -> Any:
    """x in another type, the one of the result."""
    return x.astype(place.dtype)


def _ignoring_nan(is_better: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: jnp.where(is_better(x, y) | jnp.isnan(y), x, y)


ATEN.rows({"fmax": _ignoring_nan(jnp.greater_equal), "fmin": _ignoring_nan(jnp.less_equal)})


@ATEN.row("atan2")
def atan2(y: Any, x: Any) -> Any:
    """The angle of (x, y), whose gradient at the origin is 0."""
    is_origin = (x == 0) & (y == 0)
    held = jax.lax.stop_gradient(jnp.arctan2(y, x))
    return jnp.where(is_origin, held, jnp.arctan2(y, jnp.where(is_origin, 1, x)))


@ATEN.row("angle")
def angle(x: Any) -> Any:
    """pi of negative numbers, 0 of others."""
    return jnp.where(jnp.isnan(x), jnp.nan, jnp.where(x < 0, jnp.pi, 0))


@ATEN.row("heaviside")
def heaviside(x: Any, at_zero: Any) -> Any:
    """0 of negative numbers and NaN, 1 of positive ones."""
    return jnp.where(x == 0, at_zero, x > 0)


@ATEN.row("copysign.Tensor", "copysign.Scalar")
def copysign(x: Any, y: Any) -> Any:
    """x with the sign of y; no gradient where x is 0."""
    held = jax.lax.stop_gradient(jnp.copysign(x, y))
    is_same = jnp.signbit(held) == jnp.signbit(x)
    return jnp.where(x == 0, held, jnp.where(is_same, x, -x))


@ATEN.row("frexp.Tensor")
def frexp(x: Any) -> Any:
    """Fraction and exponent of two."""
    return jnp.frexp(x)


@ATEN.row("polygamma")
def polygamma(order: int, x: Any) -> Any:
    """The derivative of digamma of an order, 0 or 1."""
    if order > 1:  # JAX's are those of positive numbers alone
        raise UsageError(
            "SW_TORCH_OPERATOR",
            f"polygamma requires order 0 or 1, got {order}",
            hint="write it with other operators",
        )
    return (digamma, trigamma)[order](x)


@ATEN.row("round.decimals")
def round_decimals(x: Any, decimals: int = 0) -> Any:
    """x rounded to so many digits."""
    return jnp.round(x, decimals)


@ATEN.row("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other")
def xlogy(x: Any, y: Any) -> Any:
    """x log(y), 0 where x is, whatever y."""
    has_no_log = (x == 0) & ((y <= 0) | (y == jnp.inf))
    return x * jnp.log(jnp.where(has_no_log, 1, y))


@ATEN.row("type_as")
def type_as(x: Any, other: Any) -> Any:
    """x in the type of another tensor."""
    return x.astype(other.dtype)
