"""ONNX models written by the schema that reads them, to be damaged: no package is needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardwright.compiler.frontend.onnx.schema import MODEL, SCHEMA
from shardwright.compiler.frontend.onnx.tensors import TYPES
from shardwright.compiler.frontend.onnx.wire import Kind, Message

FLOAT, INT, STRING = 1, 7, 8


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def sized(number: int, content: bytes) -> bytes:
    """A field with a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def encoded(message: Message, name: str = MODEL) -> bytes:
    """A message; what is not said of it is left out."""
    return b"".join(
        _field(number, field.kind, value)
        for number, field in sorted(SCHEMA[name].items())
        for value in _values(message.get(field.name), field.is_many)
    )


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
    return sized(number, encoded(value, kind))


def value(name: str, *dims: int | str, dtype: int = FLOAT) -> Message:
    """An input or a result."""
    sizes = [{"name": dim} if isinstance(dim, str) else {"size": dim} for dim in dims]
    return {"name": name, "type": {"tensor": {"type": dtype, "shape": {"dims": sizes}}}}


def tensor(name: str, array: Any) -> Message:
    """An initializer, or the value of an attribute."""
    array = np.asarray(array)
    number = next(n for n, dtype in TYPES.items() if dtype == array.dtype)
    return {"name": name, "dims": array.shape, "type": number, "raw": array.tobytes()}


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> Message:
    """A node; inputs and outputs have spaces between them, `-` is one that is left out."""
    left = [name.strip("-") for name in inputs.split()]
    said = [attribute(name, value) for name, value in attributes.items()]
    return {
        "operator": operator,
        "name": f"the_{operator}",
        "inputs": left,
        "outputs": outputs.split(),
        "attributes": said,
    }


def attribute(name: str, value: Any) -> Message:
    match value:
        case str():
            return {"name": name, "type": 3, "s": value.encode()}
        case int():
            return {"name": name, "type": 2, "i": value}
        case float():
            return {"name": name, "type": 1, "f": value}
        case dict():
            return {"name": name, "type": 5, "g": value}
        case np.ndarray():
            return {"name": name, "type": 4, "t": tensor("", value)}
    return {"name": name, "type": 7, "ints": value}


def graph(
    nodes: Sequence[Message],
    inputs: Sequence[Message],
    results: Sequence[Message],
    **tensors: Any,
) -> Message:
    held = [tensor(name, array) for name, array in tensors.items()]
    return {
        "name": "made",
        "nodes": nodes,
        "inputs": inputs,
        "outputs": results,
        "initializers": held,
    }


def model(graph: Message, opset: int = 17, **rest: Any) -> Message:
    imports = [{"domain": "", "version": opset}]
    return {"ir_version": 8, "graph": graph, "opsets": imports, **rest}
