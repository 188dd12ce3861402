"""Tensors of an ONNX file as arrays: their types, and where their elements are.

Elements lie in the bytes of the file, in lists of numbers, or in a file beside it (external data).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.compiler.frontend.graphs.errors import untyped
from shardwright.compiler.frontend.graphs.types import HALVES, Array
from shardwright.compiler.frontend.onnx.errors import damaged
from shardwright.compiler.frontend.onnx.wire import Message

TYPES: Mapping[int, np.dtype[Any]] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    4: np.dtype(np.uint16),
    5: np.dtype(np.int16),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    9: np.dtype(np.bool_),
    10: np.dtype(np.float16),
    11: np.dtype(np.float64),
    12: np.dtype(np.uint32),
    13: np.dtype(np.uint64),
    16: np.dtype(ml_dtypes.bfloat16),
    17: np.dtype(ml_dtypes.float8_e4m3fn),
    19: np.dtype(ml_dtypes.float8_e5m2),
    21: np.dtype(ml_dtypes.uint4),
    22: np.dtype(ml_dtypes.int4),
}
"""Number of an element type in a file -> the type. Source: `TensorProto.DataType` of onnx.proto."""
_NO_NUMBERS = {
    0: "no type",
    8: "strings",
    14: "complex64",
    15: "complex128",
    18: "float8_e4m3fnuz",
    20: "float8_e5m2fnuz",
    23: "float4_e2m1",
    24: "float8_e8m0",
}
_LISTS = ("floats", "int32s", "int64s", "doubles", "uint64s")
EXTERNAL = 1
"""`TensorProto.data_location` of elements in another file."""


def type_of(number: int, what: str) -> np.dtype[Any]:
    """The element type of a number. Raises ImportRuleError for one without a counterpart."""
    if number not in TYPES:
        raise untyped(what, _NO_NUMBERS.get(number, f"element type {number}"))
    return TYPES[number]


def array_of(tensor: Message, folder: Path) -> Array:
    """The values of a tensor; external data lies in `folder` or below.

    Raises ImportRuleError for types without a counterpart, and for more or fewer elements than its
    dims say.
    """
    name = tensor["name"] or "a constant"
    dtype, shape = type_of(tensor["type"], f"tensor {name}"), tuple(tensor["dims"])
    if any(dim < 0 for dim in shape):
        raise damaged(f"tensor {name} of shape {list(shape)}")
    count = math.prod(shape)
    if tensor["location"] == EXTERNAL:
        flat = _unpacked(external_bytes(tensor, folder), dtype, name, count)
    elif len(tensor["raw"]) or not any(tensor[key] for key in _LISTS):
        flat = _unpacked(tensor["raw"], dtype, name, count)
    else:
        flat = _listed(tensor, dtype)
    if flat.size != count:
        raise damaged(f"{flat.size} elements of tensor {name} of shape {list(shape)}")
    return flat.reshape(shape)


def _unpacked(raw: Any, dtype: np.dtype[Any], name: str, count: int) -> Array:
    """Elements from bytes, little-endian and row by row."""
    if dtype in HALVES:
        pairs = np.frombuffer(raw, np.uint8)
        halves = np.stack((pairs & 15, pairs >> 4), -1).reshape(-1)
        halves = halves[:count] if 0 <= len(halves) - count <= 1 else halves
        return _of_bits(halves, dtype)
    if len(raw) % dtype.itemsize:
        raise damaged(f"{len(raw)} bytes of tensor {name} of {dtype}")
    return np.frombuffer(raw, dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype)


def _of_bits(halves: Array, dtype: np.dtype[Any]) -> Array:
    """Numbers of 4 bits from their bits."""
    signed = halves.astype(np.int8)
    if dtype == HALVES[1]:
        signed = np.where(signed > 7, signed - 16, signed)
    return signed.astype(dtype)


def _listed(tensor: Message, dtype: np.dtype[Any]) -> Array:
    """Elements from the list that is kept of their type; those of narrow types are bits."""
    key = next(key for key in _LISTS if tensor[key])
    numbers = tensor[key]
    if key == "int32s" and dtype in HALVES:
        return _unpacked(bytes(n & 255 for n in numbers), dtype, "", math.prod(tensor["dims"]))
    if key == "int32s" and dtype.kind not in "iub":
        bits = np.dtype(f"u{dtype.itemsize}")
        return np.asarray(numbers, np.int64).astype(bits).view(dtype)
    kind = {"floats": np.float32, "doubles": np.float64}.get(key, np.int64)
    return np.asarray(numbers, kind).astype(dtype)


def external_bytes(tensor: Message, folder: Path) -> bytes:
    """The bytes of a tensor in a file beside the model. Raises ImportRuleError without them."""
    name = tensor["name"] or "a constant"
    entries = {entry["key"]: entry["value"] for entry in tensor["external"]}
    place = entries.get("location", "")
    root, path = folder.resolve(), (folder / place).resolve()
    if not place or not path.is_relative_to(root):
        raise damaged(f"tensor {name} in {place or 'a file without a name'}, outside of the folder")
    numbers = [entries.get(key) or "0" for key in ("offset", "length")]
    if not all(number.isdecimal() for number in numbers):
        raise damaged(f"tensor {name} in {place} at {' and '.join(numbers)}")
    offset, length = map(int, numbers)
    try:
        size = path.stat().st_size if path.is_file() else -1
        length = length if entries.get("length") else size - offset
        if length < 0 or offset + length > size:
            raise OSError(f"bytes {offset} to {offset + length} of {max(size, 0)}")
        with path.open("rb") as file:
            file.seek(offset)
            found: bytes = file.read(length)
            return found
    except OSError as error:
        given = f"tensor {name} in {place}, which cannot be read: {error.strerror or error}"
        raise damaged(given) from error
