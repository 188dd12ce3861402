"""Whole numbers in fp32 as integers: sums of integer products, of scattered updates, over ranks.

The machine adds integers in fp32, exactly up to 2^24 (NCC_EVRF035, 060, 061, 063), and its
conversion saturates. StableHLO's integers wrap around, which the low bits of a 32-bit integer are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import CompareAttrs, ConvertAttrs
from shardwright.compiler.ir.types import Value

_UNSIGNED = (DType.U32, DType.U64)  # as wide as the engines compute, or wider


class Emit(Protocol):
    """Adds an op and gives its result."""

    def __call__(self, name: str, *operands: Value, attrs: object = None) -> Value:
        """See the class."""


def as_integers(emit: Emit, total: Value, dtype: DType, terms: Sequence[Value]) -> Value:
    """`total` (fp32, whole) as `dtype`, wrapped around; `terms` are what was summed, as the user
    wrote it: unsigned ones have no negative sum."""

    def convert(value: Value, to: DType) -> Value:
        return emit("convert", value, attrs=ConvertAttrs(to))

    if dtype not in (DType.I32, DType.I64, *_UNSIGNED):
        return convert(convert(total, DType.I32), dtype)
    whole = convert(total, dtype)
    if dtype not in _UNSIGNED or all(v.type.dtype.value.startswith("ui") for v in terms):
        return whole
    negative = emit("compare", total, emit("abs", total), attrs=CompareAttrs("NE"))
    return emit("select", negative, convert(convert(total, DType.I32), dtype), whole)
