"""Element types: names, widths and their NumPy storage.

Every package names a type by its StableHLO spelling (`f32`, `bf16`, `i32`, ...). Values of narrow
float types are held by `ml_dtypes`; arithmetic on them is the business of the reference and of the
engines.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UsageError


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
    F8E4M3 = "f8E4M3"
    F8E4M3FN = "f8E4M3FN"
    F8E5M2 = "f8E5M2"
    TF32 = "tf32"
    F32 = "f32"
    F64 = "f64"

    # Types are hashed by the million; an enum's own hash is that of its name, in Python.
    __hash__ = object.__hash__

    @cached_property
    def numpy(self) -> np.dtype:
        """NumPy storage type (`ml_dtypes` for bf16 and fp8, fp32 for tf32, bool for i1).

        Raises UsageError where ml_dtypes is needed and missing: fp32 bundles need only NumPy.
        """
        if self in _ML_DTYPES:
            return _ml_dtype(self)
        dtype: np.dtype = np.dtype(_NUMPY[self])
        return dtype

    @cached_property
    def bytes(self) -> int:
        """Bytes per element in memory (i1 is stored as one byte)."""
        return _ML_BYTES[self] if self in _ML_DTYPES else self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        """True for floating-point types."""
        return self in _FLOATS

    @property
    def is_narrow(self) -> bool:
        """True for floats with fewer significant bits than fp32; arithmetic on them is in fp32."""
        return self.is_float and self not in (DType.F32, DType.F64)

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers, not for i1."""
        return self is not DType.PRED and not self.is_float

    @classmethod
    def from_numpy(cls, dtype: np.dtype) -> DType:
        """The type stored as `dtype`. Raises KeyError when there is none."""
        return _of_numpy(dtype)


_ML_DTYPES = {
    DType.BF16: "bfloat16",
    DType.F8E4M3: "float8_e4m3",
    DType.F8E4M3FN: "float8_e4m3fn",
    DType.F8E5M2: "float8_e5m2",
}
_FLOATS = frozenset((*_ML_DTYPES, DType.F16, DType.TF32, DType.F32, DType.F64))
_ML_BYTES = {DType.BF16: 2, DType.F8E4M3: 1, DType.F8E4M3FN: 1, DType.F8E5M2: 1}
_TF32_DROPPED_BITS = 13  # of fp32's 23 mantissa bits tf32 keeps 10 (hardware.md, data types)


def _ml_dtype(dtype: DType) -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise UsageError(
            "SW_NEEDS_ML_DTYPES",
            f"values of type {dtype.value} require the package ml_dtypes",
            None,
            "pip install ml_dtypes",
        ) from error
    narrow: np.dtype = np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    return narrow


def strided(array: np.ndarray, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """A read-only view of `array` with other sizes and strides (bytes), in every element type:
    NumPy's `as_strided` asks for the type by name, and it has none for some of ml_dtypes.
    """
    bits = array.view(f"u{array.itemsize}")
    view = np.lib.stride_tricks.as_strided(bits, shape, strides, writeable=False)
    return view.view(array.dtype)


def cast(array: np.ndarray, dtype: DType) -> np.ndarray:
    """`array` in the storage type of `dtype`; floats round to nearest even, out of range is
    infinite (NaN where the type has no infinity).
    """
    if dtype is not DType.TF32:
        return array.astype(dtype.numpy, copy=False)
    return _tf32(array.astype(np.float32))


def _tf32(array: np.ndarray) -> np.ndarray:
    """A fp32 array with the mantissa rounded to 10 bits, to nearest even."""
    bits = array.view(np.uint32)
    odd = (bits >> _TF32_DROPPED_BITS) & 1
    half = np.uint32((1 << (_TF32_DROPPED_BITS - 1)) - 1)
    kept = np.uint32(0xFFFFFFFF ^ ((1 << _TF32_DROPPED_BITS) - 1))
    result: np.ndarray = np.where(np.isfinite(array), (bits + half + odd) & kept, bits)
    return result.astype(np.uint32).view(np.float32)


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
    DType.TF32: np.float32,
    DType.F32: np.float32,
    DType.F64: np.float64,
}
_OF_NAME = {np.dtype(v).name: k for k, v in _NUMPY.items()} | {
    name: dtype for dtype, name in _ML_DTYPES.items()
}

_FP32_MAX = float(np.finfo(np.float32).max)
LARGEST = {
    DType.F32: _FP32_MAX,
    DType.TF32: (2 - 2.0**-10) * 2.0**127,
    DType.BF16: (2 - 2.0**-7) * 2.0**127,
    DType.F16: float(np.finfo(np.float16).max),
    DType.F8E4M3: 240.0,
    DType.F8E5M2: 57344.0,
}
"""The largest finite number of each type with infinities. Source: hardware notes, data types."""


@cache  # NumPy makes a name anew each time it is asked, longer than small arrays are computed
def _of_numpy(dtype: np.dtype) -> DType:
    return _OF_NAME[np.dtype(dtype).name]
