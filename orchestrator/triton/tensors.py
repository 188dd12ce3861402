"""Triton's tensors as NumPy arrays, and back.

NumPy has no bf16, and so has a Python model's `as_numpy`: such tensors cross as DLPack, where they
are 16-bit integers but for the code of their type (dlpack.h: DLTensor, DLDataTypeCode).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType

_NAME = b"dltensor"
_UINT, _BFLOAT = 1, 4  # DLDataTypeCode
_CPU = (1, 0)  # DLDevice
_BITS = 16


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Exported:
    """A capsule as NumPy takes it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


def array_of(tensor: Any, dtype: DType) -> np.ndarray[Any, Any]:
    """The values of a `pb_utils.Tensor`. Raises TypeError for another type than `dtype`."""
    is_bf16 = dtype is DType.BF16
    try:
        given = tensor.to_dlpack() if is_bf16 else tensor.as_numpy()
    except Exception as error:  # pb_utils: of a type that cannot be had so
        raise TypeError(str(error)) from error
    if is_bf16:
        _retype(given, _BFLOAT, _UINT)
        return np.from_dlpack(_Exported(given)).view(dtype.numpy)
    array: np.ndarray[Any, Any] = given
    if array.dtype != dtype.numpy:
        raise TypeError(str(array.dtype))
    return array


def tensor_of(utils: Any, name: str, array: np.ndarray[Any, Any]) -> Any:
    """The `pb_utils.Tensor` of an array; `utils` is `triton_python_backend_utils`."""
    if array.dtype != _bf16():
        return utils.Tensor(name, np.ascontiguousarray(array).reshape(array.shape))
    bits = np.array(array, order="C").view(np.uint16)  # DLPack has no read-only memory
    capsule = bits.__dlpack__()
    _retype(capsule, _UINT, _BFLOAT)
    return utils.Tensor.from_dlpack(name, capsule)


def _bf16() -> np.dtype[Any] | None:
    """The type, None where ml_dtypes, and so any array of it, is missing."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def _retype(capsule: Any, old: int, new: int) -> None:
    """Call 16-bit elements by another name. Raises TypeError where they are not of `old`."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = ctypes.cast(pointer(capsule, _NAME), ctypes.POINTER(_Tensor)).contents
    if (tensor.code, tensor.bits, tensor.lanes) != (old, _BITS, 1):
        raise TypeError(f"DLPack type {tensor.code} of {tensor.bits} bits")
    tensor.code = new
