"""Elementwise and reduction arithmetic in NumPy, with StableHLO's meaning, shared by both value
levels.

Floats narrower than 32 bits are held in fp32 arrays whose values the narrow type can represent;
integers are exact and wrap. Those that work in place take `out=`, where they write their result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.polynomial import chebyshev

from shardwright.collectives.values.execute import REDUCTIONS
from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.sim_cluster.values.rounding import narrow

Array = np.ndarray
Function = Callable[..., Array]

F32 = np.dtype(np.float32)


def storage(dtype: DType) -> np.dtype:
    """The NumPy type in which values of `dtype` are held between operations."""
    return F32 if dtype.is_narrow else dtype.numpy


def hold(array: Array, dtype: DType) -> Array:
    """`array` (elements of `dtype`) in its storage type; the same array when it already is."""
    return array.astype(F32) if dtype.is_narrow else array


def rounded(array: Array, dtype: DType) -> Array:
    """`array` (fp32) rounded to `dtype` (see `rounding.py`); other types pass through."""
    return narrow(array, dtype).astype(F32) if dtype.is_narrow else array


def convert(array: Array, source: DType, target: DType) -> Array:
    """StableHLO convert: float to integer truncates (and saturates), anything to i1 tests against
    zero."""
    if target is DType.PRED:
        nonzero: Array = array != 0
        return nonzero
    if source.is_float and target.is_integer:
        return saturate(np.trunc(array), target)
    return rounded(array.astype(storage(target)), target)


def saturate(array: Array, dtype: DType) -> Array:
    """Whole floats as integers of `dtype`, clamped to its range; NaN becomes 0."""
    info = np.iinfo(dtype.numpy)
    wide = np.clip(
        np.nan_to_num(array.astype(np.float64), posinf=2.0**64, neginf=-(2.0**64)),
        info.min,
        info.max,
    )
    limit = np.float64(info.max)
    return np.where(
        wide >= limit, info.max, np.minimum(wide, np.nextafter(limit, 0.0)).astype(dtype.numpy)
    )


def _logistic(x: Array, out: Array | None = None) -> Array:
    result: Array = np.negative(x, out=out)
    np.exp(result, out=result)
    np.add(result, 1, out=result)
    np.reciprocal(result, out=result)
    return result


def _rsqrt(x: Array, out: Array | None = None) -> Array:
    result: Array = np.sqrt(x, out=out)
    np.reciprocal(result, out=result)
    return result


ERF_ONE = 4.0  # 1 - erf(4) is below half an ulp of fp32
_ERF_DEGREE = 26  # the series then misses erf(x) / x by less than 1e-9


@cache
def _erf_series() -> Array:
    """Chebyshev coefficients of erf(x) / x over x * x in 0..16, interpolated in fp64."""

    def ratio(t: Array) -> Array:
        x = np.sqrt((t + 1) * (ERF_ONE * ERF_ONE / 2))
        return np.array([math.erf(v) / v for v in x])

    series: Array = chebyshev.chebinterpolate(ratio, _ERF_DEGREE)
    return series


def _erf(x: Array) -> Array:
    """The error function, to the last place of fp32."""
    wide = np.clip(x, -ERF_ONE, ERF_ONE).astype(np.float64)
    result = wide * chebyshev.chebval(wide * wide / (ERF_ONE * ERF_ONE / 2) - 1, _erf_series())
    return np.asarray(np.clip(result, -1, 1), F32)


def _normal(x: Array) -> Array:
    """The normal distribution function."""
    return (_erf(x * np.float32(math.sqrt(0.5))) + 1) * np.float32(0.5)


def _gelu(x: Array) -> Array:
    return np.asarray(np.multiply(x, _normal(x), dtype=F32))


def _gelu_dx(x: Array) -> Array:
    density = np.exp(x * x * np.float32(-0.5)) * np.float32(1 / math.sqrt(2 * math.pi))
    return np.asarray(np.add(_normal(x), x * density, dtype=F32))


def _gelu_apprx_tanh(x: Array) -> Array:
    inner = (x * x * np.float32(0.044715) + 1) * x * np.float32(math.sqrt(2 / math.pi))
    return np.asarray(np.multiply(x, (np.tanh(inner) + 1) * np.float32(0.5), dtype=F32))


def _silu(x: Array) -> Array:
    return np.asarray(np.multiply(x, _logistic(x), dtype=F32))


def _silu_dx(x: Array) -> Array:
    gate = _logistic(x)
    return np.asarray(np.multiply(gate, (1 - gate) * x + 1, dtype=F32))


def _sign(x: Array, out: Array | None = None) -> Array:
    """-1, 0 or 1 of floats; zeros and NaN stay what they are."""
    result: Array = np.copysign(np.sign(x), x, out=out)
    return result


def _select(pred: Array, on_true: Array, on_false: Array) -> Array:
    return np.where(pred, on_true, on_false)


def _clamp(low: Array, x: Array, high: Array) -> Array:
    return np.asarray(np.minimum(np.maximum(low, x), high))


def _integer_divide(a: Array, b: Array) -> Array:
    """Truncating division; x / 0 is all ones, as XLA has it."""
    safe = np.where(b == 0, 1, b)
    quotient = np.floor_divide(a, safe)
    inexact = (quotient * safe != a) & ((a < 0) != (safe < 0))
    return np.where(b == 0, np.array(-1).astype(a.dtype), (quotient + inexact).astype(a.dtype))


def _integer_remainder(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; x rem 0 is x."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _integer_power(a: Array, b: Array) -> Array:
    """Wrapping power; negative exponents give 0 except for bases 1 and -1."""
    result = np.power(a, np.maximum(b, 0))
    odd = (b & 1).astype(bool)
    unit = np.where(a == 1, 1, np.where(a == -1, np.where(odd, -1, 1), 0)).astype(a.dtype)
    return np.where(b < 0, unit, result)


def _shift(shift: np.ufunc, arithmetic: bool = False) -> Function:
    """A shift whose counts of the width or more (negative ones too) shift everything out. The sign
    moves in only with `arithmetic`, for unsigned operands too, as XLA has it."""

    def shifted(a: Array, b: Array) -> Array:
        width, kind = a.dtype.itemsize, "i" if arithmetic else "u"
        bits, count = a.view(f"{kind}{width}"), b.view(f"u{width}")
        inside = count < 8 * width
        safe = np.where(inside, count, 8 * width - 1 if arithmetic else 0).astype(bits.dtype)
        result: Array = shift(bits, safe).view(a.dtype)
        return result if arithmetic else np.where(inside, result, np.zeros((), a.dtype))

    return shifted


def _random_bits(counter: Array, key: Array) -> Array:
    return _mixed(_mixed(counter) ^ key)


def _mixed(x: Array) -> Array:
    """A finalizer of hash tables (lowbias32), which stands for the machine's generator."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return np.asarray(x ^ (x >> np.uint32(16)))


_COMMON: dict[str, Function] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "negate": np.negative,
    "abs": np.absolute,
    "select": _select,
    "clamp": _clamp,
}
_FLOAT: dict[str, Function] = {
    **_COMMON,
    "divide": np.true_divide,
    "power": np.power,
    "remainder": np.fmod,
    "sign": _sign,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": np.reciprocal,
    "exponential": np.exp,
    "exponential_minus_one": np.expm1,
    "log": np.log,
    "log_plus_one": np.log1p,
    "logistic": _logistic,
    "tanh": np.tanh,
    "sine": np.sin,
    "cosine": np.cos,
    "erf": _erf,
    "atan": np.arctan,
    "gelu": _gelu,
    "gelu_dx": _gelu_dx,
    "gelu_apprx_tanh": _gelu_apprx_tanh,
    "silu": _silu,
    "silu_dx": _silu_dx,
    "floor": np.floor,
    "ceil": np.ceil,
    "round_nearest_even": np.rint,
    "is_finite": np.isfinite,
}
_INTEGER: dict[str, Function] = {
    **_COMMON,
    "divide": _integer_divide,
    "power": _integer_power,
    "remainder": _integer_remainder,
    "sign": np.sign,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "shift_left": _shift(np.left_shift),
    "shift_right_logical": _shift(np.right_shift),
    "shift_right_arithmetic": _shift(np.right_shift, arithmetic=True),
    "random_bits": _random_bits,
}
_PRED: dict[str, Function] = {
    "add": np.logical_or,
    "multiply": np.logical_and,
    "maximum": np.logical_or,
    "minimum": np.logical_and,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "select": _select,
    "clamp": _clamp,
}
COMPARE: dict[str, Function] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
BITWISE = _INTEGER.keys() - _FLOAT.keys()
"""Ops that every engine does on the bits of integers, whatever it computes in otherwise."""
_IN_PLACE_COMPOSITES = (_logistic, _rsqrt, _sign)
_REDUCE: dict[str, np.ufunc] = {
    **REDUCTIONS,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
# Long fp32 sums over outer dims are cut into pieces of this many terms, so that the rounding error
# grows with the piece and not with the whole; one piece is what 128 partitions add up.
SUM_PIECE = 128


def function(name: str, dtype: DType) -> Function:
    """The function of elementwise `name` on operands of `dtype`. Raises SimulationError for an
    unknown pair."""
    table = _FLOAT if dtype.is_float else _PRED if dtype is DType.PRED else _INTEGER
    try:
        return table[name]
    except KeyError:
        raise SimulationError(
            "SW_SIM_UNKNOWN_OP", f"no elementwise {name} on {dtype.value}"
        ) from None


def works_in_place(fn: Function) -> bool:
    """True when `out` may be one of the operands."""
    return isinstance(fn, np.ufunc) or fn in _IN_PLACE_COMPOSITES


def reduce_array(x: Array, kind: str, axes: tuple[int, ...]) -> Array:
    """`x` reduced over `axes`, which stay with size 1. The element type stays the same."""
    ufunc = _REDUCE[kind]
    if ufunc is np.add and x.dtype.kind == "f":
        x = _partial_sums(x, axes)
    result: Array = ufunc.reduce(x, axis=axes, keepdims=True, dtype=x.dtype)
    return result


def _partial_sums(x: Array, axes: tuple[int, ...]) -> Array:
    for axis in axes:
        if x.shape[axis] > 4 * SUM_PIECE and x.strides[axis] != x.itemsize:
            x = np.add.reduceat(x, np.arange(0, x.shape[axis], SUM_PIECE), axis=axis)
    return x
