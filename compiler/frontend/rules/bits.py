"""Reinterpretation of bits: conversions between widths, and rounding to an odd float format.

Both are spelled in integer ops. A 64-bit value put together from 32-bit words remembers them, so
that taking it apart again gives the words: the machine has no 64-bit integers to pass them through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.registry import imports, refuse
from shardwright.compiler.ir.ops import (
    BitcastConvertAttrs,
    CompareAttrs,
    ConcatenateAttrs,
    ConstantAttrs,
    ConvertAttrs,
    ReshapeAttrs,
    SliceAttrs,
)
from shardwright.compiler.ir.types import TensorType, Value

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site

UNSIGNED = {1: DType.U8, 2: DType.U16, 4: DType.U32, 8: DType.U64}


def constant(site: Site, number: float, type: TensorType) -> Value:
    """A splat of `type`."""
    return site.emit("constant", (), ConstantAttrs.full(number, type)).result


def splat(site: Site, number: float, like: Value) -> Value:
    """`number` in the type of `like`."""
    return constant(site, number, like.type)


def binary(site: Site, name: str, a: Value, number: float) -> Value:
    """An op of a value and a splat."""
    return site.emit(name, (a, splat(site, number, a))).result


def convert(site: Site, value: Value, dtype: DType) -> Value:
    """`value` as `dtype`."""
    if value.type.dtype is dtype:
        return value
    return site.emit("convert", (value,), ConvertAttrs(dtype)).result


def bitcast(site: Site, value: Value, dtype: DType) -> Value:
    """The bits of `value` as a type of the same width."""
    if value.type.dtype is dtype:
        return value
    return site.emit("bitcast_convert", (value,), BitcastConvertAttrs(dtype)).result


@imports("stablehlo.bitcast_convert")
def bitcast_convert(site: Site) -> Sequence[Value]:
    """Equal widths are one op; a last dim of pieces appears or goes when the width changes."""
    (operand,) = site.operands
    given, wanted = operand.type.dtype, site.result_type().dtype
    if DType.PRED in (given, wanted):
        refuse("NCC_EVRF064", "bitcast_convert requires elements of whole bytes, got i1")
    if given.bytes == wanted.bytes:
        return (bitcast(site, operand, wanted),)
    if given.bytes > wanted.bytes:
        return (bitcast(site, _apart(site, operand, UNSIGNED[wanted.bytes]), wanted),)
    return (bitcast(site, together(site, operand, UNSIGNED[wanted.bytes]), wanted),)


def _apart(site: Site, value: Value, piece: DType) -> Value:
    """Every element as a new last dim of `piece`s, the lowest first."""
    known = site.importer.words.get(value)
    if known is not None and piece is DType.U32:
        return known
    value = bitcast(site, value, UNSIGNED[value.type.dtype.bytes])
    column = ReshapeAttrs((*value.type.shape, 1))
    pieces = []
    for k in range(value.type.dtype.bytes // piece.bytes):
        shifted = binary(site, "shift_right_logical", value, 8 * piece.bytes * k)
        pieces.append(site.emit("reshape", (convert(site, shifted, piece),), column).result)
    return site.emit("concatenate", pieces, ConcatenateAttrs(value.type.rank)).result


def together(site: Site, value: Value, wide: DType) -> Value:
    """The pieces along the last dim as one element of the unsigned type `wide`."""
    value = bitcast(site, value, UNSIGNED[value.type.dtype.bytes])
    *kept, count = value.type.shape
    total: Value | None = None
    for k in range(count):
        start, limit = (0,) * len(kept) + (k,), (*kept, k + 1)
        part = site.emit("slice", (value,), SliceAttrs(start, limit, (1,) * value.type.rank))
        part = site.emit("reshape", part.results, ReshapeAttrs(tuple(kept)))
        term = convert(site, part.result, wide)
        term = binary(site, "shift_left", term, 8 * value.type.dtype.bytes * k)
        total = term if total is None else site.emit("or", (total, term)).result
    assert total is not None, "the width grows, so there are pieces"
    if value.type.dtype is DType.U32:
        site.importer.words[total] = value
    return total


_FORMATS = {DType.F64: (11, 52), DType.F32: (8, 23), DType.BF16: (8, 7), DType.F16: (5, 10)}


@imports("stablehlo.reduce_precision")
def reduce_precision(site: Site) -> Sequence[Value]:
    """Nothing when the format holds the type (JAX marks saved values so), else the nearest value
    of the format: through bf16 where it is that format, else on the bits.
    """
    (operand,) = site.operands
    dtype = operand.type.dtype
    exponent, mantissa = site.int("exponent_bits"), site.int("mantissa_bits")
    own_exponent, own_mantissa = _FORMATS[dtype]
    if exponent >= own_exponent and mantissa >= own_mantissa:
        return (operand,)
    if dtype is DType.F64:
        refuse("NCC_EVRF001", "reduce_precision requires elements up to 32 bits, got f64")
    wide = convert(site, operand, DType.F32)
    if (exponent, mantissa) == _FORMATS[DType.BF16]:
        short = site.emit("convert", (wide,), ConvertAttrs(DType.BF16, rounds=True))
        return (convert(site, short.result, dtype),)
    rounded = _rounded(site, wide, min(mantissa, own_mantissa))
    return (convert(site, _in_range(site, rounded, exponent, mantissa), dtype),)


def _rounded(site: Site, x: Value, mantissa: int) -> Value:
    """fp32 `x` with `mantissa` bits after the point, nearest even; NaN stays."""
    drop = _FORMATS[DType.F32][1] - mantissa
    if not drop:
        return x
    bits = bitcast(site, x, DType.U32)
    odd = binary(site, "and", binary(site, "shift_right_logical", bits, drop), 1)
    raised = site.emit("add", (binary(site, "add", bits, (1 << (drop - 1)) - 1), odd)).result
    kept = bitcast(site, binary(site, "and", raised, 0xFFFFFFFF & -(1 << drop)), DType.F32)
    nan = site.emit("compare", (x, x), CompareAttrs("NE")).result
    return site.emit("select", (nan, x, kept)).result


def _in_range(site: Site, x: Value, exponent: int, mantissa: int) -> Value:
    """Infinity above the largest number of the format, zero below its smallest normal one."""
    bias = (1 << (exponent - 1)) - 1
    largest = (2.0 - 2.0**-mantissa) * 2.0**bias
    size = site.emit("abs", (x,)).result
    sign = site.emit("sign", (x,)).result
    above = site.emit("compare", (size, splat(site, largest, x)), CompareAttrs("GT")).result
    endless = binary(site, "multiply", sign, np.inf)
    x = site.emit("select", (above, endless, x)).result
    below = site.emit("compare", (size, splat(site, 2.0 ** (1 - bias), x)), CompareAttrs("LT"))
    zero = binary(site, "multiply", sign, 0.0)
    return site.emit("select", (*below.results, zero, x)).result
