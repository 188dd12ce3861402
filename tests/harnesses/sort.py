"""Harness rows of `sort`: one key and several, both directions and orders, ties, odd floats."""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import SortAttrs
from tests.harnesses.case import OpCase

F32, BF16, I32, U32, PRED = DType.F32, DType.BF16, DType.I32, DType.U32, DType.PRED


def _sort(
    keys: tuple[tuple[int, str, str], ...],
    dtypes: tuple[DType, ...],
    note: str,
    dim: int = 1,
    values: tuple[str, ...] = (),
) -> OpCase:
    operands = tuple(((5, 23), dtype) for dtype in dtypes)
    return OpCase("sort", operands, SortAttrs(dim, keys), values, note=note)


UP, DOWN = (0, "LT", "numeric"), (0, "GT", "total")

CASES: tuple[OpCase, ...] = (
    _sort((UP,), (F32,), "up"),
    _sort((UP,), (F32,), "special", values=("special",)),
    _sort((UP,), (F32, I32), "special_pairs", values=("special", "small")),
    _sort((DOWN,), (F32, I32), "down_special_pairs", values=("special", "small")),
    _sort((UP,), (F32,), "dim0", dim=0),
    _sort((DOWN,), (BF16, F32), "bf16"),
    _sort((UP,), (I32, F32), "ties_keep_their_places"),
    _sort(((0, "GT", "total"),), (U32, PRED), "bits", values=("bits", "bits")),
    _sort(((0, "GT", "total"), (1, "LT", "numeric")), (I32, F32, F32), "two_keys"),
    _sort(((1, "LT", "total"), (0, "GT", "total")), (PRED, PRED, I32), "bools"),
)
