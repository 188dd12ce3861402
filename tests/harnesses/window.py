"""Harness rows of `reduce_window` and `select_and_scatter`; `unfold` is held against NumPy's own
windows in `tests/compiler/lower/test_windows.py`.
"""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import ReduceWindowAttrs, SelectAndScatterAttrs
from shardwright.compiler.ir.ops.window import window_count
from tests.harnesses.case import BF16_ULP, EXACT, FLOAT_ULPS, OpCase

F32, BF16, I32, PRED = DType.F32, DType.BF16, DType.I32, DType.PRED
Dims = tuple[int, ...]

GAPS = {"unfold": "made by lowering only; StableHLO has no such op"}


def _fold(
    kind: str, shape: Dims, sizes: Dims, strides: Dims, low: Dims, high: Dims, dtype: DType = F32
) -> OpCase:
    attrs = ReduceWindowAttrs(kind, sizes, strides, low, high)
    rounding = kind in ("add", "multiply") and dtype.is_float
    rtol = EXACT if not rounding else 4 * BF16_ULP if dtype is BF16 else FLOAT_ULPS
    values = ("positive",) if kind == "multiply" else ()
    return OpCase("reduce_window", ((shape, dtype),), attrs, values, rtol, f"{kind}{sizes}")


def _scatter(
    select: str, shape: Dims, sizes: Dims, strides: Dims, low: Dims, high: Dims, dtype: DType = F32
) -> OpCase:
    attrs = SelectAndScatterAttrs(select, sizes, strides, low, high)
    rows = zip(shape, sizes, strides, low, high, strict=True)
    source = tuple(window_count(n + lo + hi, k, s) for n, k, s, lo, hi in rows)
    rtol = BF16_ULP if dtype is BF16 else FLOAT_ULPS
    operands = ((shape, dtype), (source, dtype))
    return OpCase("select_and_scatter", operands, attrs, ("small", ""), rtol, f"{select}{sizes}")


NONE4, ONE4 = (0, 0, 0, 0), (1, 1, 1, 1)
POOL = ((2, 9, 8, 5), (1, 3, 3, 1), (1, 2, 2, 1))

CASES: tuple[OpCase, ...] = (
    _fold("max", *POOL, NONE4, NONE4),
    _fold("max", *POOL, (0, 1, 0, 0), (0, 1, 1, 0), BF16),
    _fold("add", *POOL, (0, 1, 1, 0), (0, 1, 1, 0)),
    _fold("add", *POOL, NONE4, NONE4, BF16),
    _fold("min", (2, 9, 8, 5), (1, 2, 3, 2), (1, 2, 2, 1), (0, -1, 0, 1), (0, 0, -2, 0)),
    _fold("max", (4, 9), (2, 3), (1, 1), (1, 1), (0, 1), I32),
    _fold("or", (4, 9), (2, 3), (1, 1), (1, 1), (0, 1), PRED),
    _fold("add", (3, 70), (1, 70), (1, 1), (0, 69), (0, 0)),
    _fold("max", (75, 3), (75, 1), (1, 1), (74, 0), (0, 0)),
    _fold("multiply", (41, 3), (41, 1), (1, 1), (0, 0), (40, 0)),
    _fold("add", (3, 64), (1, 37), (1, 2), (0, 5), (0, 3), BF16),
    _fold("add", (2, 7, 7, 5), (1, 7, 7, 1), ONE4, NONE4, NONE4),
    _fold("max", (4, 5), (1, 1), (1, 1), (0, 0), (0, 0)),
    _fold("add", (4, 6), (1, 1), (2, 3), (0, 0), (0, 0)),
    _scatter("GE", *POOL, NONE4, NONE4),
    _scatter("GE", (2, 8, 8, 3), (1, 2, 2, 1), (1, 2, 2, 1), NONE4, NONE4),
    _scatter("GE", *POOL, (0, 1, 1, 0), (0, 1, 0, 0)),
    _scatter("GT", *POOL, NONE4, NONE4),
    _scatter("LE", (9, 4), (4, 1), (1, 1), (2, 0), (1, 0)),
    _scatter("LT", (9, 4), (4, 1), (3, 1), (0, 0), (1, 0), BF16),
)
