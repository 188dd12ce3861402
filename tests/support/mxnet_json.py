"""Symbols and parameters as MXNet writes them, by what reads them: no package is needed."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TYPES = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}
TYPES |= {"bool": 7}
V2 = 0xF993FAC9


def said(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Attributes as texts."""
    return {key: str(value) for key, value in attributes.items()}


def variable(name: str, **attributes: str) -> dict[str, Any]:
    row = {"op": "null", "name": name, "inputs": []}
    return row | ({"attrs": attributes} if attributes else {})


def operator(op: str, name: str, *inputs: Any, **attributes: Any) -> dict[str, Any]:
    """An input is the number of a node, or [node, result]."""
    places = [[n, 0, 0] if isinstance(n, int) else [*n, 0] for n in inputs]
    row = {"op": op, "name": name, "inputs": places}
    return row | ({"attrs": said(attributes)} if attributes else {})


def symbol(*rows: Any, heads: Sequence[Any] = (), **rest: Any) -> str:
    """The JSON of a symbol, whose head is its last node."""
    found = {
        "nodes": list(rows),
        "arg_nodes": [n for n, row in enumerate(rows) if row["op"] == "null"],
        "heads": list(heads) or [[len(rows) - 1, 0, 0]],
        "attrs": {"mxnet_version": ["int", 10901]},
    }
    return json.dumps(found | rest, indent=2)


def of_node(op: str, count: int, attributes: Mapping[str, Any], results: int) -> str:
    """A symbol of one node of `count` variables x0, x1, ..."""
    rows = [variable(f"x{n}") for n in range(count)]
    node = operator(op, "node", *range(count), **attributes)
    return symbol(*rows, node, heads=[[count, n, 0] for n in range(results)])


def parameters(**arrays: Any) -> bytes:
    """The bytes of a list of arrays, `arg:` before each name but those of `aux_`."""
    found = struct.pack("<QQQ", 0x112, 0, len(arrays))
    for array in arrays.values():
        found += one_array(np.asarray(array))
    found += struct.pack("<Q", len(arrays))
    for name in arrays:
        text = f"arg:{name}".encode()
        found += struct.pack("<Q", len(text)) + text
    return found


def one_array(array: Any, storage: int = 0) -> bytes:
    """An array with the header of release 2."""
    head = struct.pack("<Iii", V2, storage, array.ndim) + struct.pack(
        f"<{array.ndim}q", *array.shape
    )
    return head + struct.pack("<iii", 1, 0, TYPES[str(array.dtype)]) + array.tobytes()
