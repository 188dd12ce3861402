"""Harness rows of the shape ops."""

from __future__ import annotations

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import constant_attrs
from shardwright.compiler.ir.ops import (
    BroadcastInDimAttrs,
    ConcatenateAttrs,
    DynamicSliceAttrs,
    IotaAttrs,
    PadAttrs,
    ReshapeAttrs,
    ReverseAttrs,
    SliceAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.types import tensor_type
from tests.harnesses.case import OpCase

F32, BF16, I32, PRED = DType.F32, DType.BF16, DType.I32, DType.PRED
Dims = tuple[int, ...]


def _broadcast(shape: Dims, dims: Dims, out: Dims, dtype: DType = F32) -> OpCase:
    return OpCase("broadcast_in_dim", ((shape, dtype),), BroadcastInDimAttrs(dims, out))


def _slice(start: Dims, limit: Dims, stride: Dims) -> OpCase:
    return OpCase("slice", (((9, 11), F32),), SliceAttrs(start, limit, stride), note=str(stride))


def _pad(low: Dims, high: Dims, interior: Dims, dtype: DType = F32) -> OpCase:
    note = f"{low}{high}{interior}"
    return OpCase("pad", (((4, 5), dtype), ((), dtype)), PadAttrs(low, high, interior), note=note)


def _dynamic(sizes: Dims, dtype: DType = I32) -> OpCase:
    operands = (((6, 8), F32), ((), dtype), ((), dtype))
    values = ("", "around:6", "around:8")
    return OpCase("dynamic_slice", operands, DynamicSliceAttrs(sizes), values, note=str(sizes))


def _update(shape: Dims, dtype: DType = I32) -> OpCase:
    operands = (((6, 8), F32), (shape, F32), ((), dtype), ((), dtype))
    return OpCase("dynamic_update_slice", operands, None, ("", "", "around:6", "around:8"))


def _constant(array: object, dtype: DType, note: str) -> OpCase:
    return OpCase("constant", (), constant_attrs(np.asarray(array), dtype), note=note)


CASES: tuple[OpCase, ...] = (
    _broadcast((), (), (3, 4)),
    _broadcast((3,), (0,), (3, 4), BF16),
    _broadcast((4,), (1,), (3, 4)),
    _broadcast((3, 1), (0, 2), (3, 2, 5)),
    _broadcast((3, 4), (1, 0), (4, 3)),
    OpCase("reshape", (((6, 4), F32),), ReshapeAttrs((2, 3, 4))),
    OpCase("reshape", (((1, 1), I32),), ReshapeAttrs(())),
    OpCase("transpose", (((2, 3, 4), F32),), TransposeAttrs((2, 0, 1))),
    OpCase("transpose", (((5, 3), BF16),), TransposeAttrs((1, 0))),
    _slice((0, 0), (9, 11), (1, 1)),
    _slice((2, 1), (9, 10), (3, 2)),
    _slice((4, 4), (4, 9), (1, 1)),
    OpCase("concatenate", (((2, 3), F32), ((2, 5), F32), ((2, 1), F32)), ConcatenateAttrs(1)),
    OpCase("concatenate", (((2, 3), BF16), ((4, 3), BF16)), ConcatenateAttrs(0)),
    _pad((1, 0), (0, 2), (0, 0)),
    _pad((0, 2), (3, 0), (1, 2), BF16),
    _pad((-1, 1), (2, -2), (0, 0)),
    _pad((-2, -3), (0, -1), (1, 2)),
    _pad((-4, 0), (3, 0), (0, 0), I32),
    _pad((-9, 0), (3, 0), (1, 0)),
    OpCase("reverse", (((3, 4, 5), F32),), ReverseAttrs((0, 2))),
    OpCase("iota", (), IotaAttrs(1, tensor_type((3, 5), I32))),
    OpCase("iota", (), IotaAttrs(0, tensor_type((7,), F32)), note="float"),
    OpCase("iota", (), IotaAttrs(0, tensor_type((300,), BF16)), note="bf16"),
    _constant([[1.5, -2.25], [np.inf, 1e-30]], F32, "matrix"),
    _constant(np.full((3, 2), 7), I32, "splat"),
    _constant([1.0, 0.333], BF16, "bf16"),
    _constant([[True, False], [False, True]], PRED, "pred"),
    _constant(True, PRED, "true"),
    _constant(np.zeros((0, 2)), F32, "empty"),
    _dynamic((1, 8)),
    _dynamic((2, 3)),
    _dynamic((6, 8), DType.U32),
    _update((1, 8)),
    _update((2, 3)),
    _update((5, 8), DType.I64),
)
