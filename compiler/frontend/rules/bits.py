"""Reinterpretation of bits: conversions between widths, and rounding to an odd float format.

Both are spelled in integer ops. A 64-bit value put together from 32-bit words remembers them, so
that taking it apart again gives the words: the machine has no 64-bit integers to pass them through.
"""

from __future__ import annotations

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.registry import Maker, Site, Values, imports, refuse
from shardwright.compiler.ir.ops import ConvertAttrs
from shardwright.compiler.ir.types import Value

UNSIGNED = {1: DType.U8, 2: DType.U16, 4: DType.U32, 8: DType.U64}


@imports("stablehlo.bitcast_convert")
def bitcast_convert(site: Site) -> Values:
    """Equal widths are one op; a last dim of pieces appears or goes when the width changes."""
    (operand,) = site.operands
    given, wanted = operand.type.dtype, site.result_type().dtype
    if DType.PRED in (given, wanted):
        refuse("NCC_EVRF064", "bitcast_convert requires elements of whole bytes, got i1")
    if given.bytes > wanted.bytes:
        operand = apart(site, operand, UNSIGNED[wanted.bytes], operand.type.rank)
    elif given.bytes < wanted.bytes:
        operand = together(site, operand, UNSIGNED[wanted.bytes])
    return (site.make.bitcast(operand, wanted),)


def apart(site: Site, value: Value, piece: DType, dim: int) -> Value:
    """Every element as a new dim `dim` of `piece`s, the lowest first."""
    known = site.importer.words.get(value)
    if known is not None and piece is DType.U32:
        return known
    make = site.make
    value = make.bitcast(value, UNSIGNED[value.type.dtype.bytes])
    shape = value.type.shape
    pieces = []
    for k in range(value.type.dtype.bytes // piece.bytes):
        shifted = make.with_number("shift_right_logical", value, 8 * piece.bytes * k)
        pieces.append(make.reshape(make.convert(shifted, piece), (*shape[:dim], 1, *shape[dim:])))
    return make.concatenate(pieces, dim)


def together(site: Site, value: Value, wide: DType, dim: int = -1) -> Value:
    """The pieces along a dim, the last unless named, as one element of the unsigned type `wide`."""
    make = site.make
    value = make.bitcast(value, UNSIGNED[value.type.dtype.bytes])
    shape = value.type.shape
    dim %= len(shape)
    kept = (*shape[:dim], *shape[dim + 1 :])
    total: Value | None = None
    for k in range(shape[dim]):
        start = tuple(k if d == dim else 0 for d in range(len(shape)))
        limit = tuple(k + 1 if d == dim else n for d, n in enumerate(shape))
        term = make.convert(make.reshape(make.slice(value, start, limit), kept), wide)
        term = make.with_number("shift_left", term, 8 * value.type.dtype.bytes * k)
        total = term if total is None else make.op("or", total, term)
    assert total is not None, "the width grows, so there are pieces"
    if value.type.dtype is DType.U32:
        site.importer.words[total] = value
    return total


_FORMATS = {DType.F64: (11, 52), DType.F32: (8, 23), DType.BF16: (8, 7), DType.F16: (5, 10)}


@imports("stablehlo.reduce_precision")
def reduce_precision(site: Site) -> Values:
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
        refuse("NCC_ESPP004", "reduce_precision requires elements up to 32 bits, got f64")
    make = site.make
    wide = make.convert(operand, DType.F32)
    if (exponent, mantissa) == _FORMATS[DType.BF16]:
        short = make.op("convert", wide, attrs=ConvertAttrs(DType.BF16, rounds=True))
        return (make.convert(short, dtype),)
    rounded = _rounded(make, wide, min(mantissa, own_mantissa))
    return (make.convert(_in_range(make, rounded, exponent, mantissa), dtype),)


def _rounded(make: Maker, x: Value, mantissa: int) -> Value:
    """fp32 `x` with `mantissa` bits after the point, nearest even; NaN stays."""
    drop = _FORMATS[DType.F32][1] - mantissa
    if not drop:
        return x
    bits = make.bitcast(x, DType.U32)
    odd = make.with_number("and", make.with_number("shift_right_logical", bits, drop), 1)
    raised = make.add(make.with_number("add", bits, (1 << (drop - 1)) - 1), odd)
    kept = make.bitcast(make.with_number("and", raised, 0xFFFFFFFF & -(1 << drop)), DType.F32)
    return make.op("select", make.compare(x, x, "NE"), x, kept)


def _in_range(make: Maker, x: Value, exponent: int, mantissa: int) -> Value:
    """Infinity above the largest number of the format, zero below its smallest normal one."""
    bias = (1 << (exponent - 1)) - 1
    largest = (2.0 - 2.0**-mantissa) * 2.0**bias
    size, sign = make.op("abs", x), make.op("sign", x)
    above = make.compare(size, make.splat(largest, x.type), "GT")
    x = make.op("select", above, make.with_number("multiply", sign, np.inf), x)
    below = make.compare(size, make.splat(2.0 ** (1 - bias), x.type), "LT")
    return make.op("select", below, make.with_number("multiply", sign, 0.0), x)
