"""Whole numbers in fp32 as integers: sums of integer products, of scattered updates, over ranks.

The machine adds integers in fp32, exactly up to 2^24 (NCC_EVRF035, 060, 061, 063), and its
conversion saturates. StableHLO's integers wrap around, which the low bits of a 32-bit integer are.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower.level import Site

_UNSIGNED = (DType.U32, DType.U64)  # as wide as the engines compute, or wider


def as_integers(b: Site, total: Value, dtype: DType, terms: Sequence[Value]) -> Value:
    """`total` (fp32, whole) as `dtype`, wrapped around; `terms` are what was summed, as the user
    wrote it: unsigned ones have no negative sum."""
    if dtype not in (DType.I32, DType.I64, *_UNSIGNED):
        return b.convert(b.convert(total, DType.I32), dtype)
    whole = b.convert(total, dtype)
    if dtype not in _UNSIGNED or all(v.type.dtype.value.startswith("ui") for v in terms):
        return whole
    negative = b.compare(total, b.op("abs", total), "NE")
    return b.op("select", negative, b.convert(b.convert(total, DType.I32), dtype), whole)
