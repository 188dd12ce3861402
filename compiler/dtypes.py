"""Element types: names, widths and their NumPy storage.

Every package names a type by its StableHLO spelling (`f32`, `bf16`, `i32`, ...). Values of narrow
float types are held by `ml_dtypes`; arithmetic on them is the business of the reference and of the
engines.
"""

from __future__ import annotations

import enum
from functools import cached_property
from typing import Any

import numpy as np

from compiler.diagnostics import UsageError


class DType(enum.Enum):
    """An element type; the value is its StableHLO spelling."""

    PRED = "i1"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    U8 = "ui8"
    U16 = "ui16"
    U32 = "ui32"
    U64 = "ui64"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"

    @cached_property
    def numpy(self) -> np.dtype:
        """NumPy storage type (`ml_dtypes` for bf16, bool for i1).

        Raises UsageError for bf16 where ml_dtypes is missing: fp32 bundles need only NumPy.
        """
        if self is DType.BF16:
            return _bfloat16()
        dtype: np.dtype = np.dtype(_NUMPY[self])
        return dtype

    @cached_property
    def bytes(self) -> int:
        """Bytes per element in memory (i1 is stored as one byte)."""
        return 2 if self is DType.BF16 else self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        """True for floating-point types."""
        return self in (DType.F16, DType.BF16, DType.F32, DType.F64)

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers, not for i1."""
        return self is not DType.PRED and not self.is_float

    @classmethod
    def from_numpy(cls, dtype: np.dtype) -> DType:
        """The type stored as `dtype`. Raises KeyError when there is none."""
        return _OF_NAME[np.dtype(dtype).name]


def _bfloat16() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise UsageError(
            "SW_NEEDS_ML_DTYPES",
            "values of type bf16 require the package ml_dtypes",
            None,
            "pip install ml_dtypes",
        ) from error
    narrow: np.dtype = np.dtype(ml_dtypes.bfloat16)
    return narrow


_NUMPY: dict[DType, Any] = {
    DType.PRED: np.bool_,
    DType.I8: np.int8,
    DType.I16: np.int16,
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.U8: np.uint8,
    DType.U16: np.uint16,
    DType.U32: np.uint32,
    DType.U64: np.uint64,
    DType.F16: np.float16,
    DType.F32: np.float32,
    DType.F64: np.float64,
}
_OF_NAME = {np.dtype(v).name: k for k, v in _NUMPY.items()} | {"bfloat16": DType.BF16}
