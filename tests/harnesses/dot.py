"""Harness rows of `dot_general`."""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import DotGeneralAttrs
from tests.harnesses.case import BF16_ULP, EXACT, FLOAT_ULPS, OpCase

F32, BF16, I32 = DType.F32, DType.BF16, DType.I32
Shape = tuple[int, ...]


def _row(
    lhs: Shape,
    rhs: Shape,
    batch: tuple[Shape, Shape],
    contract: tuple[Shape, Shape],
    dtype: DType = F32,
    out: DType | None = None,
    note: str = "",
) -> OpCase:
    attrs = DotGeneralAttrs(*batch, *contract, out or dtype)
    rtol = {F32: FLOAT_ULPS, BF16: BF16_ULP}.get(attrs.dtype, EXACT)
    return OpCase("dot_general", ((lhs, dtype), (rhs, dtype)), attrs, (), rtol, note)


PLAIN = (((), ()), ((1,), (0,)))

CASES: tuple[OpCase, ...] = (
    _row((7, 33), (33, 19), *PLAIN),
    _row((7, 33), (33, 19), *PLAIN, BF16),
    _row((7, 33), (33, 19), *PLAIN, BF16, F32, "accumulates_f32"),
    _row((7, 33), (33, 19), *PLAIN, I32),
    _row((33, 7), (19, 33), ((), ()), ((0,), (1,)), note="both_transposed"),
    _row((3, 7, 11), (3, 11, 5), ((0,), (0,)), ((2,), (1,)), note="batched"),
    _row((7, 3, 11), (5, 11, 3), ((1,), (2,)), ((2,), (1,)), note="batch_inside"),
    _row((4, 3, 5, 6), (6, 4, 7, 5), ((0,), (1,)), ((2, 3), (3, 0)), note="two_contracted"),
    _row((2, 3, 5), (5, 4, 6), ((), ()), ((2,), (0,)), note="two_free"),
    _row((5,), (5,), ((), ()), ((0,), (0,)), note="inner"),
    _row((5,), (4,), ((), ()), ((), ()), note="outer"),
    _row((2, 9), (2, 9), ((0, 1), (0, 1)), ((), ()), note="only_batch"),
    _row((0, 4), (4, 3), *PLAIN, note="empty"),
)
