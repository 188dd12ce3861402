"""The messages of an ONNX file, as far as a model needs them: field number -> field.

Source: `onnx.proto` of ONNX 1.16 (numbers of fields never change).
"""

from __future__ import annotations

from typing import Any

from shardwright.compiler.frontend.onnx.wire import Field, Kind, Schema

_INTEGER, _FLOAT, _TEXT, _BYTES = Kind.INTEGER, Kind.FLOAT, Kind.TEXT, Kind.BYTES
MODEL = "model"


def _fields(*rows: tuple[Any, ...]) -> dict[int, Field]:
    """Fields of (number, name, kind) or (number, name, kind, "many")."""
    return {row[0]: Field(row[1], row[2], len(row) > 3) for row in rows}


SCHEMA: Schema = {
    MODEL: _fields(
        (1, "ir_version", _INTEGER),
        (2, "producer", _TEXT),
        (7, "graph", "graph"),
        (8, "opsets", "opset", "many"),
        (14, "metadata", "entry", "many"),
        (25, "functions", "function", "many"),
    ),
    "opset": _fields((1, "domain", _TEXT), (2, "version", _INTEGER)),
    "graph": _fields(
        (1, "nodes", "node", "many"),
        (2, "name", _TEXT),
        (5, "initializers", "tensor", "many"),
        (11, "inputs", "value", "many"),
        (12, "outputs", "value", "many"),
        (13, "declared", "value", "many"),
        (15, "sparse", _BYTES, "many"),
    ),
    "node": _fields(
        (1, "inputs", _TEXT, "many"),
        (2, "outputs", _TEXT, "many"),
        (3, "name", _TEXT),
        (4, "operator", _TEXT),
        (5, "attributes", "attribute", "many"),
        (7, "domain", _TEXT),
    ),
    "attribute": _fields(
        (1, "name", _TEXT),
        (2, "f", _FLOAT),
        (3, "i", _INTEGER),
        (4, "s", _BYTES),
        (5, "t", "tensor"),
        (6, "g", "graph"),
        (7, "floats", _FLOAT, "many"),
        (8, "ints", _INTEGER, "many"),
        (9, "strings", _BYTES, "many"),
        (20, "type", _INTEGER),
        (21, "reference", _TEXT),
    ),
    "tensor": _fields(
        (1, "dims", _INTEGER, "many"),
        (2, "type", _INTEGER),
        (4, "floats", _FLOAT, "many"),
        (5, "int32s", _INTEGER, "many"),
        (7, "int64s", _INTEGER, "many"),
        (8, "name", _TEXT),
        (9, "raw", _BYTES),
        (10, "doubles", Kind.DOUBLE, "many"),
        (11, "uint64s", _INTEGER, "many"),
        (13, "external", "entry", "many"),
        (14, "location", _INTEGER),
    ),
    "entry": _fields((1, "key", _TEXT), (2, "value", _TEXT)),
    "value": _fields((1, "name", _TEXT), (2, "type", "type")),
    "type": _fields((1, "tensor", "tensor_type")),
    "tensor_type": _fields((1, "type", _INTEGER), (2, "shape", "shape")),
    "shape": _fields((1, "dims", "dim", "many")),
    "dim": _fields((1, "size", _INTEGER), (2, "name", _TEXT)),
    "function": _fields(
        (1, "name", _TEXT),
        (4, "inputs", _TEXT, "many"),
        (5, "outputs", _TEXT, "many"),
        (7, "nodes", "node", "many"),
        (9, "opsets", "opset", "many"),
        (10, "domain", _TEXT),
        (11, "defaults", "attribute", "many"),
    ),
}
