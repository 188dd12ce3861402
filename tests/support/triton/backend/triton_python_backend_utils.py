"""The objects that Triton's Python backend gives a model (its README): what a model may call, with
what Triton does to it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

BF16 = "TYPE_BF16"
TYPES = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
}
_CODE_AT = 20  # bytes into DLTensor: data, device, ndim


class TritonModelException(Exception):  # noqa: N818, its name in Triton
    """What a model raises to fail its load, or all requests of a call."""


class TritonError:
    """The error of a request."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS = range(7)
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


def _code(capsule: Any) -> ctypes.c_uint8:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + _CODE_AT)


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Tensor:
    """A tensor of an array, or, by `from_dlpack`, of a type that NumPy does not have."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        kinds = [kind for kind, dtype in TYPES.items() if array.dtype == dtype]
        if not kinds:
            raise TritonModelException(f"tensor {name}: type {array.dtype} is not supported")
        self._name, self._array, self._type = name, array, kinds[0]

    @classmethod
    def of_type(cls, name: str, array: np.ndarray, kind: str) -> Tensor:
        """As Triton makes it of bytes; bf16 is given as its bits."""
        made = cls(name, array)
        made._type = kind
        return made

    @classmethod
    def from_dlpack(cls, name: str, capsule: Any) -> Tensor:
        code = _code(capsule)
        is_bf16 = code.value == 4
        if is_bf16:
            code.value = 1
        made = cls(name, np.from_dlpack(_Capsule(capsule)))
        if is_bf16:
            made._type = BF16
        return made

    def to_dlpack(self) -> Any:
        capsule = np.array(self._array).__dlpack__()
        if self._type == BF16:
            _code(capsule).value = 4
        return capsule

    def name(self) -> str:
        return self._name

    def triton_dtype(self) -> str:
        return self._type

    def as_numpy(self) -> np.ndarray:
        if self._type == BF16:
            raise TritonModelException("bf16 has no type of NumPy's: use to_dlpack")
        return self._array

    def bits(self) -> np.ndarray:
        """For the server: the elements, bf16 as bits."""
        return self._array


class InferenceRequest:
    """A request to a model."""

    def __init__(self, tensors: Sequence[Tensor], outputs: Sequence[str] = ()) -> None:
        self._tensors, self._outputs = list(tensors), list(outputs)
        self.cancelled = threading.Event()

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()


class InferenceResponse:
    """What a model answers."""

    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        if not isinstance(output_tensors, list):
            raise TritonModelException("output_tensors must be a list")
        self._tensors, self._error = output_tensors, error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class ModelConfig:
    """The configuration that `auto_complete_config` completes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def add_input(self, row: dict[str, Any]) -> None:
        self._add("input", row, ("name", "data_type", "dims", "optional"))

    def add_output(self, row: dict[str, Any]) -> None:
        self._add("output", row, ("name", "data_type", "dims"))

    def _add(self, kind: str, row: dict[str, Any], allowed: Sequence[str]) -> None:
        if unknown := set(row) - set(allowed):
            raise ValueError(f"unknown properties {unknown} of an {kind}")
        for said in self._config[kind]:
            if said["name"] == row["name"]:
                if (said["data_type"], said["dims"]) != (row["data_type"], row["dims"]):
                    raise ValueError(f"configuration expects another {kind} {row['name']}")
                return
        self._config[kind].append(row)

    def set_max_batch_size(self, most: int) -> None:
        if self._config["max_batch_size"] > most:
            raise ValueError("configuration expects a larger max_batch_size")
        self._config["max_batch_size"] = most
