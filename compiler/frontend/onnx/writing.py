"""ONNX files written: messages by the schema that reads them, and models that are changed.

Protobuf's fields are kept as the bytes that they are wherever nothing is changed, so that what the
schema does not know of (texts, metadata) goes through as it was. Equal messages are equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.compiler.frontend.graphs.types import Array
from shardwright.compiler.frontend.onnx.schema import MODEL, SCHEMA
from shardwright.compiler.frontend.onnx.tensors import TYPES
from shardwright.compiler.frontend.onnx.wire import Kind, Message, fields

_HALVES = (np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.int4))
MOST_BYTES = 2**31 - 1
"""What a message of protobuf holds (its encoding page)."""


def encoded(message: Message, name: str = MODEL) -> bytes:
    """A message; what is not said of it is left out."""
    return b"".join(
        _field(number, field.kind, value)
        for number, field in sorted(SCHEMA[name].items())
        for value in _values(message.get(field.name), field.is_many)
    )


def changed(data: bytes, name: str, change: Mapping[str, Callable[[list[bytes]], Any]]) -> bytes:
    """A message with some of its fields changed: `change` has functions, by the name of a field,
    from the contents that it has in the message, in order, to those that it is to have, as bytes or
    as messages. The others are what they were, in their order, before them. Raises DamagedError."""
    numbers = {field.name: number for number, field in SCHEMA[name].items()}
    wanted = {numbers[each]: each for each in change}
    held: dict[str, list[bytes]] = {each: [] for each in change}
    kept = []
    for number, whole, content in fields(data):
        if number in wanted:
            held[wanted[number]].append(content)
        else:
            kept.append(whole)
    made = [
        _field(number, SCHEMA[name][number].kind, value)
        for number, each in sorted(wanted.items())
        for value in change[each](held[each])
    ]
    return b"".join((*kept, *made))


def tensor(name: str, array: Array) -> Message:
    """The message of an array, its elements in its bytes."""
    return {"name": name, "dims": array.shape, "type": type_number(array.dtype), "raw": _raw(array)}


def _raw(array: Array) -> bytes:
    if array.dtype not in _HALVES:
        dtype = array.dtype.newbyteorder("<") if array.dtype.isbuiltin == 1 else array.dtype
        return np.ascontiguousarray(array, dtype).tobytes()
    bits = array.reshape(-1).astype(np.int8).astype(np.uint8) & 15
    bits = np.append(bits, np.zeros(bits.size % 2, np.uint8))
    return (bits[::2] | bits[1::2] << 4).astype(np.uint8).tobytes()


def type_number(dtype: np.dtype[Any]) -> int:
    """The number of an element type in a file. Raises KeyError for one that ONNX does not have."""
    return {each: number for number, each in TYPES.items()}[dtype]


def declared(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Message:
    """The message of an input, a result or a value inside of a graph."""
    dims = [{"size": size} for size in shape]
    return {"name": name, "type": {"tensor": {"type": type_number(dtype), "shape": {"dims": dims}}}}


def attribute(name: str, value: Any) -> Message:
    """The message of an attribute: a whole number, a text, a list of whole numbers, or a message of
    a tensor."""
    match value:
        case int():
            return {"name": name, "type": 2, "i": value}
        case str():
            return {"name": name, "type": 3, "s": value.encode()}
        case dict():
            return {"name": name, "type": 4, "t": value}
    return {"name": name, "type": 7, "ints": value}


def varint(value: int) -> bytes:
    """A whole number; a negative one has 64 bits."""
    value &= 2**64 - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def sized(number: int, content: bytes) -> bytes:
    """A field with a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def _values(value: Any, is_many: bool) -> Iterator[Any]:
    if is_many:
        yield from value or ()
    elif value is not None:
        yield value


def _field(number: int, kind: Kind | str, value: Any) -> bytes:
    match kind:
        case Kind.INTEGER:
            return varint(number << 3) + varint(value)
        case Kind.FLOAT:
            return varint(number << 3 | 5) + struct.pack("<f", value)
        case Kind.DOUBLE:
            return varint(number << 3 | 1) + struct.pack("<d", value)
        case Kind.TEXT:
            return sized(number, value.encode() if isinstance(value, str) else value)
        case Kind.BYTES:
            return sized(number, bytes(value))
    return sized(number, value if isinstance(value, bytes) else encoded(value, kind))
