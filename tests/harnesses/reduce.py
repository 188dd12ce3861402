"""Harness rows of `reduce`."""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import ReduceAttrs
from tests.harnesses.case import BF16_ULP, EXACT, FLOAT_ULPS, OpCase

F32, BF16, I32, PRED = DType.F32, DType.BF16, DType.I32, DType.PRED


def _row(kind: str, dims: tuple[int, ...], dtype: DType, values: str = "") -> OpCase:
    rounded = dtype.is_float and kind in ("add", "multiply")
    # XLA:CPU rounds every partial sum of a bf16 reduction, the reference only the last one.
    rtol = {F32: FLOAT_ULPS, BF16: 4 * BF16_ULP}[dtype] if rounded else EXACT
    note = f"{kind}_{'_'.join(map(str, dims))}"
    return OpCase("reduce", (((4, 7, 13), dtype),), ReduceAttrs(kind, dims), (values,), rtol, note)


CASES: tuple[OpCase, ...] = (
    *(_row(kind, (2,), d) for kind in ("add", "max", "min") for d in (F32, BF16, I32)),
    *(_row("add", dims, F32) for dims in ((0,), (1,), (0, 2), (0, 1, 2), (), (2, 1))),
    _row("multiply", (1,), F32, "nonzero"),
    _row("min", (0, 1), F32),
    *(_row(kind, (1, 2), d, "bits") for kind in ("and", "or", "xor") for d in (I32, PRED)),
    _row("add", (0,), I32, "bits"),
    _row("max", (0, 1), PRED),
    OpCase("reduce", (((3, 0), F32),), ReduceAttrs("max", (1,)), note="empty"),
)
