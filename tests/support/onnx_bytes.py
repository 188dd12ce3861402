"""ONNX models written by the schema that reads them, to be damaged: no package is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.compiler.frontend.onnx.tensors import TYPES
from shardwright.compiler.frontend.onnx.wire import Message

FLOAT, INT, STRING = 1, 7, 8


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
