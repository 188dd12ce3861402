"""torch's types, as the machine and JAX have them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.compiler.diagnostics import UsageError

INT_MIN, INT_MAX = -(2**31), 2**31 - 1

_TYPES = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
"""Name of a `torch.dtype` -> what it is computed in. No engine has 64 bits (docs/op-types.md), and
JAX, unless told otherwise, has none either: indices and counts are kept in 32."""


def numpy_type(dtype: Any) -> np.dtype[Any]:
    """The type that a `torch.dtype` is computed in. Raises UsageError for one without, as complex
    numbers."""
    name = str(dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise UsageError(
            "SW_TORCH_TYPE",
            f"a type of {', '.join(_TYPES)} is required, got {name}",
            hint="no engine has such numbers: complex ones are pairs of real arrays",
        )
    found: np.dtype[Any] = np.dtype(_TYPES[name])
    return found


def scalar(value: Any) -> Any:
    """A Python number as an argument; integers of 64 bits become the nearest of 32."""
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, INT_MIN), INT_MAX)
    return value


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The values of a tensor, in the type that it is computed in."""
    import torch

    plain = tensor.detach().cpu()
    is_known = plain.dtype is not torch.bfloat16 and "float8" not in str(plain.dtype)  # to NumPy
    values: np.ndarray[Any, Any] = (plain if is_known else plain.float()).numpy()
    return values.astype(numpy_type(plain.dtype))


def fitting_array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """`array_of`. Raises UsageError for integers that it would cut."""
    import torch

    if tensor.dtype is torch.int64 and tensor.numel():
        low, high = (int(found) for found in torch.aminmax(tensor))
        if low < INT_MIN or high > INT_MAX:
            raise UsageError(
                "SW_TORCH_INPUT",
                f"compiled code requires integers of 32 bits, got {low if low < INT_MIN else high}",
                hint="no engine has 64 bits: keep such numbers out of what is traced",
            )
    return array_of(tensor)


def tensor_of(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """The tensor of values that were computed, in a type of torch's by its name."""
    import torch

    is_numpys = array.dtype.isbuiltin == 1  # not bf16 and fp8
    plain = np.array(array) if is_numpys else array.astype(np.float32)
    return torch.from_numpy(plain).to(getattr(torch, dtype))


def bytes_of(tensor: Any) -> bytes:
    """The elements of a tensor as torch has them, row by row."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def without_gradients() -> AbstractContextManager[None]:
    """No graph of gradients is kept inside."""
    import torch

    found: AbstractContextManager[None] = torch.no_grad()
    return found


def torch_version() -> str:
    """The torch that is installed."""
    import torch

    return str(torch.__version__)
