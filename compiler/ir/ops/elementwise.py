"""Elementwise ops: arithmetic, logic, comparison, selection and conversion.

All operands have one shape (there is no implicit broadcast). Floating point narrower than fp32 is
computed in fp32 and rounded once; integers follow StableHLO: wrap-around, division towards zero,
remainder with the sign of the dividend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType, cast
from shardwright.compiler.ir.opdef import ALL, FIRST, SECOND, Kind
from shardwright.compiler.ir.ops.rules import (
    check_same,
    define,
    mismatch,
    no_flops,
    rounded_once,
)
from shardwright.compiler.ir.types import TensorType, tensor_type

COMPARE: dict[str, np.ufunc] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
DIRECTIONS = tuple(COMPARE)


@dataclass(frozen=True, slots=True)
class CompareAttrs:
    """`direction` is one of EQ NE LT LE GT GE; NaN compares false except with NE."""

    direction: str


@dataclass(frozen=True, slots=True)
class ConvertAttrs:
    """The result element type. `rounds`: the model asks for the rounding itself
    (`reduce_precision`), so that it may not be left out where the result stays on chip.
    """

    dtype: DType
    rounds: bool = False


@dataclass(frozen=True, slots=True)
class BitcastConvertAttrs:
    """The result element type, of the operand's width."""

    dtype: DType


_KINDS: dict[str, Callable[[DType], bool]] = {
    "float": lambda d: d.is_float,
    "integer": lambda d: d.is_integer,
    "integer or i1": lambda d: not d.is_float,
    "signed or float": lambda d: d.is_float or (d.value.startswith("i") and d is not DType.PRED),
    "number": lambda d: d is not DType.PRED,
    "u32": lambda d: d is DType.U32,
    "any": lambda d: True,
}


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotient; integers truncate towards zero, x / 0 is -1 (all ones), as XLA has it."""
    if not np.issubdtype(a.dtype, np.integer):
        return np.asarray(a / b)
    safe = np.where(b == 0, a.dtype.type(1), b)
    quotient = a // safe
    if np.issubdtype(a.dtype, np.signedinteger):
        inexact = (quotient * safe != a) & ((a < 0) != (safe < 0))
        quotient = quotient + inexact.astype(a.dtype)
    return np.where(b == 0, np.asarray(-1).astype(a.dtype), quotient)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Remainder with the sign of the dividend; the integer x % 0 is x."""
    if not np.issubdtype(a.dtype, np.integer):
        return np.asarray(np.fmod(a, b))
    safe = np.where(b == 0, a.dtype.type(1), b)
    return np.where(b == 0, a, np.fmod(a, safe))


def _power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a ** b; integers wrap, and a negative exponent leaves only bases of magnitude one."""
    if not np.issubdtype(a.dtype, np.integer):
        return np.asarray(np.power(a, b))
    result, base = np.ones_like(a), np.array(a)
    exponent = np.where(b < 0, b & 1, b)
    for _ in range(a.dtype.itemsize * 8):
        result = np.where(exponent & 1, result * base, result)
        base, exponent = base * base, exponent >> 1
    unit = (a == 1) | (a == np.asarray(-1).astype(a.dtype))
    return np.where((b < 0) & ~unit, a.dtype.type(0), result)


def _shift(shift: np.ufunc, arithmetic: bool = False) -> Callable[..., np.ndarray]:
    """A shift whose amounts of the width or more (negative ones too) shift everything out.

    The sign bit moves in only with `arithmetic`, for unsigned operands too, as XLA has it.
    """

    def fn(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        bits = a.dtype.itemsize * 8
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        amount = np.asarray(b).view(unsigned)
        within = amount < bits
        value = np.asarray(a).view(f"i{a.dtype.itemsize}" if arithmetic else unsigned)
        safe = np.where(within, amount, bits - 1 if arithmetic else 0)
        shifted = np.asarray(shift(value, safe.astype(value.dtype))).view(a.dtype)
        return shifted if arithmetic else np.where(within, shifted, a.dtype.type(0))

    return fn


def _sign(x: np.ndarray) -> np.ndarray:
    """-1, 0 or 1; zeros and NaN stay what they are."""
    return np.where(x == 0, x, np.sign(x))


def logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-x)))


def _round_away(x: np.ndarray) -> np.ndarray:
    """The nearest whole number; halves go away from zero."""
    size = np.abs(x)
    whole = np.floor(size)
    return np.asarray(np.copysign(whole + (size - whole >= 0.5), x))


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    """Zero bits above the highest set bit, the width for 0."""
    bits = x.dtype.itemsize * 8
    value = x.view(f"u{x.dtype.itemsize}").astype(np.uint64)
    lengths = sum((value >> np.uint64(k) != 0).astype(np.int64) for k in range(bits))
    return np.asarray(bits - lengths)


erf = np.vectorize(math.erf, otypes=[np.float64])
erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution function (Hendrycks and Gimpel 2016)."""
    return np.asarray(x * 0.5 * (1 + erf(x * math.sqrt(0.5))))


def _gelu_dx(x: np.ndarray) -> np.ndarray:
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return np.asarray(0.5 * (1 + erf(x * math.sqrt(0.5))) + x * density)


def _gelu_apprx_tanh(x: np.ndarray) -> np.ndarray:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)))


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * logistic(x))


def _silu_dx(x: np.ndarray) -> np.ndarray:
    gate = logistic(x)
    return np.asarray(gate * (1 + x * (1 - gate)))


def _random_bits(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The word of a generator with `key` at `counter`: a bijection of the counter per key.

    The algorithm of the machine's generators is not published; this is a finalizer of hash tables
    applied on either side of the key (Ellis, "Hash function prospector", 2018: lowbias32).
    """
    return _mixed(_mixed(counter) ^ key)


def _mixed(x: np.ndarray) -> np.ndarray:
    for shift, factor in RANDOM_ROUNDS:
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return np.asarray(x ^ (x >> np.uint32(16)))


RANDOM_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Shift and factor of the rounds of `random_bits`."""

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": _gelu,
    "gelu_dx": _gelu_dx,
    "gelu_apprx_tanh": _gelu_apprx_tanh,
    "silu": _silu,
    "silu_dx": _silu_dx,
}
"""Functions of the Scalar engine beyond those of StableHLO (documented: NKI reference,
`nki.language`, on trn1 too). Compiled units have them, modules do not.
"""


def _function(name: str, arity: int, fn: Callable[..., Any], kind: str, **facts: Any) -> None:
    """A function of elements, whose operands and result have one type of `_KINDS`."""

    def infer(attrs: None, *types: TensorType) -> TensorType:
        check_same(*types)
        if not _KINDS[kind](types[0].dtype):
            raise mismatch(f"{kind} elements", types[0])
        return types[0]

    define(
        name,
        Kind.ELEMENTWISE,
        None,
        infer,
        rounded_once(fn),
        operands=arity,
        **facts,
    )


def _binary(name: str, fn: Callable[..., Any], kind: str = "number", **facts: Any) -> None:
    _function(name, 2, fn, kind, **facts)


def _unary(name: str, fn: Callable[..., Any], kind: str = "float", **facts: Any) -> None:
    _function(name, 1, fn, kind, **facts)


_binary("add", np.add, "any", signs=(1, 1), commutes=True)
_binary("subtract", np.subtract, signs=(1, -1))
_binary("multiply", np.multiply, "any", linear=(FIRST, SECOND), commutes=True)
_binary("divide", _divide, linear=(FIRST,))
_binary("maximum", np.maximum, "any")
_binary("minimum", np.minimum, "any")
_binary("power", _power)
_binary("remainder", _remainder)
_binary("atan2", np.arctan2, "float")
_binary("and", np.bitwise_and, "integer or i1", commutes=True)
_binary("or", np.bitwise_or, "integer or i1", commutes=True)
_binary("xor", np.bitwise_xor, "integer or i1", commutes=True)
_binary("shift_left", _shift(np.left_shift), "integer")
_binary("shift_right_logical", _shift(np.right_shift), "integer")
_binary("shift_right_arithmetic", _shift(np.right_shift, arithmetic=True), "integer")

_binary("random_bits", _random_bits, "u32")

_unary("not", np.invert, "integer or i1")
_unary("negate", np.negative, "number", signs=(-1,))
_unary("abs", np.abs, "signed or float")
_unary("sign", _sign, "signed or float")
_unary("sqrt", np.sqrt)
_unary("rsqrt", lambda x: 1 / np.sqrt(x))
_unary("exponential", np.exp)
_unary("exponential_minus_one", np.expm1)
_unary("log", np.log)
_unary("log_plus_one", np.log1p)
_unary("logistic", logistic)
_unary("tanh", np.tanh)
_unary("sine", np.sin)
_unary("cosine", np.cos)
_unary("floor", np.floor)
_unary("ceil", np.ceil)
_unary("round_nearest_even", np.rint)
_unary("round_nearest_afz", _round_away)
_unary("cbrt", np.cbrt)
_unary("tan", np.tan)
_unary("erf", erf)
_unary("erfc", erfc)
_unary("atan", np.arctan)
for _name, _activation in ACTIVATIONS.items():
    _unary(_name, _activation)
_unary("popcnt", lambda x: np.bitwise_count(x.view(f"u{x.dtype.itemsize}")), "integer")
_unary("count_leading_zeros", _leading_zeros, "integer")


def _infer_is_finite(attrs: None, operand: TensorType) -> TensorType:
    if not operand.dtype.is_float:
        raise mismatch("float elements", operand)
    return tensor_type(operand.shape, DType.PRED)


def _infer_compare(attrs: CompareAttrs, left: TensorType, right: TensorType) -> TensorType:
    check_same(left, right)
    if attrs.direction not in DIRECTIONS:
        raise mismatch(f"a direction of {' '.join(DIRECTIONS)}", attrs.direction)
    return tensor_type(left.shape, DType.PRED)


def _infer_select(
    attrs: None, pred: TensorType, on_true: TensorType, on_false: TensorType
) -> TensorType:
    check_same(on_true, on_false)
    if pred.dtype is not DType.PRED or pred.shape not in ((), on_true.shape):
        raise mismatch(f"an i1 predicate, scalar or of shape {on_true.shape}", pred)
    return on_true


def _infer_clamp(attrs: None, low: TensorType, operand: TensorType, high: TensorType) -> TensorType:
    for bound in (low, high):
        if bound.dtype is not operand.dtype or bound.shape not in ((), operand.shape):
            raise mismatch(f"bounds of type {operand} or its scalar", bound)
    return operand


def convert_array(x: np.ndarray, dtype: DType) -> np.ndarray:
    """`x` as `dtype`: floats become integers by truncation, saturating, NaN as 0; i1 is x != 0."""
    source = DType.from_numpy(x.dtype)
    if dtype is DType.PRED:
        return np.asarray(x != 0)
    if source.is_float and dtype.is_integer:
        return _saturate(x.astype(np.float64), dtype.numpy)
    return cast(x, dtype)


def _saturate(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Truncated fp64 values as integers; the limits stand in for what lies outside of them."""
    info = np.iinfo(dtype)
    inside = (x > float(info.min) - 1) & (x < float(info.max))
    value = np.where(inside, x, 0).astype(dtype)
    value = np.where(x >= float(info.max), dtype.type(info.max), value)
    return np.where(x <= float(info.min), dtype.type(info.min), value)


def _infer_bitcast(attrs: BitcastConvertAttrs, operand: TensorType) -> TensorType:
    if attrs.dtype.bytes != operand.dtype.bytes or DType.PRED in (attrs.dtype, operand.dtype):
        raise mismatch(f"a result type as wide as {operand.dtype.value}", attrs.dtype.value)
    return tensor_type(operand.shape, attrs.dtype)


define("is_finite", Kind.ELEMENTWISE, None, _infer_is_finite, rounded_once(np.isfinite))
define(
    "compare",
    Kind.ELEMENTWISE,
    CompareAttrs,
    _infer_compare,
    lambda op, *pair: COMPARE[op.attrs.direction](*pair).astype(np.bool_, copy=False),
)
define(
    "select",
    Kind.ELEMENTWISE,
    None,
    _infer_select,
    lambda op, *args: np.where(*args),
    passes=slice(1, 3),
)
define(
    "clamp",
    Kind.ELEMENTWISE,
    None,
    _infer_clamp,
    lambda op, low, x, high: np.minimum(np.maximum(x, low), high),
)
define(
    "convert",
    Kind.CAST,
    ConvertAttrs,
    lambda attrs, operand: tensor_type(operand.shape, attrs.dtype),
    lambda op, x: convert_array(x, op.attrs.dtype),
    linear=(ALL,),
)
define(
    "bitcast_convert",
    Kind.ELEMENTWISE,
    BitcastConvertAttrs,
    _infer_bitcast,
    lambda op, x: np.ascontiguousarray(x).view(op.attrs.dtype.numpy).reshape(x.shape),
    flops=no_flops,
)
