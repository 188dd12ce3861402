"""Attribute values as text that says its type, for graphs and kernels alike.

`4` `1.5` `true` `none` `word` `"any text"` `f32` `tensor<2xf32>` `[1, 2]` `{key=value}` `0xAB`
(bytes) `<8+4*r3>` (affine) `tensor 2+8+4*r3[64, 1]` (a view) `bound{offset=0, ...}`. A word in
quotes is always text, so nothing reads as something else.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import TensorType, tensor_type
from shardwright.compiler.isa.kernel import Affine, Bound, View
from shardwright.compiler.text.elements import bits_text, read_bits
from shardwright.compiler.text.fields import Given, field_values, from_fields
from shardwright.compiler.text.lexer import Cursor, is_word, name_text

_DTYPES = {dtype.value: dtype for dtype in DType}
_WORDS: dict[str, Any] = {
    "true": True,
    "false": False,
    "none": None,
    "inf": math.inf,
    "nan": math.nan,
    **_DTYPES,
}
_RESERVED = frozenset((*_WORDS, "tensor", "bound", "bits"))
_NAN = struct.pack("<d", math.nan)


def value_text(value: Any) -> str:
    """`value` as text. Raises TypeError for what has no text form."""
    if isinstance(value, np.generic):
        value = value.item()
    for kind, text in _TEXTS.items():
        if isinstance(value, kind):
            return text(value)
    raise TypeError(f"a value of class {type(value).__name__} has no text form")


def mapping_text(values: Mapping[str, Any]) -> str:
    """`{key=value, ...}` in the order of the mapping."""
    inside = ", ".join(f"{name_text(str(k))}={value_text(v)}" for k, v in values.items())
    return f"{{{inside}}}"


def affine_text(value: Affine, prefix: str = "r") -> str:
    """`8+4*r3` and the like."""
    terms = [f"{c}*{prefix}{r}" for r, c in value.terms]
    return "+".join([str(value.const), *terms] if value.const or not terms else terms)


def _float_text(value: float) -> str:
    data = struct.pack("<d", value)
    return bits_text(data) if math.isnan(value) and data != _NAN else repr(value)


def _str_text(value: str) -> str:
    return value if is_word(value) and value not in _RESERVED else json.dumps(value)


def _view_text(view: View) -> str:
    return f"tensor {view.tensor}+{affine_text(view.offset)}{value_text(view.strides)}"


def _bound_text(bound: Bound) -> str:
    return "bound" + mapping_text(field_values(bound))


_TEXTS: dict[type | tuple[type, ...], Callable[[Any], str]] = {
    bool: lambda v: "true" if v else "false",  # before int, of which it is a kind
    int: str,
    float: _float_text,
    type(None): lambda _: "none",
    DType: lambda v: str(v.value),
    TensorType: str,
    str: _str_text,
    bytes: lambda v: f"0x{v.hex().upper()}",
    Affine: lambda v: f"<{affine_text(v)}>",
    View: _view_text,
    Bound: _bound_text,
    (tuple, list): lambda v: f"[{', '.join(map(value_text, v))}]",
    Mapping: mapping_text,
}


def read_value(cursor: Cursor) -> Any:
    """The value that stands next; sequences are tuples. Raises UsageError for anything else."""
    read = _READERS.get(cursor.token.kind)
    return read(cursor) if read else cursor.integer("a value")


def _read_float(cursor: Cursor) -> float:
    token = cursor.next()
    if math.isinf(float(token.text)) and token.text != "-inf":
        raise cursor.error("a number in the range of f64", token)
    return float(token.text)


def _read_marked(cursor: Cursor) -> Any:
    if cursor.accept("["):
        return tuple(cursor.separated(lambda: read_value(cursor), "]"))
    if cursor.at("{"):
        return {key: value for key, (_, value) in read_mapping(cursor).items()}
    if cursor.accept("<"):
        found = read_affine(cursor)
        cursor.expect(">")
        return found
    raise cursor.error("a value")


def _read_word(cursor: Cursor) -> Any:
    token = cursor.next()
    match token.text:
        case "tensor":
            return _read_view(cursor)
        case "bound":
            return _read_bound(cursor)
        case "bits":
            return struct.unpack("<d", read_bits(cursor, 8))[0]
    return _WORDS.get(token.text, token.text)


def read_mapping(cursor: Cursor) -> Given:
    """`{key=value, ...}`, values with their first tokens. Raises UsageError for a second key."""
    found: Given = {}

    def entry() -> None:
        token = cursor.token
        key = cursor.name("the name of an attribute")
        if key in found:
            raise cursor.error("every attribute once", token)
        cursor.expect("=")
        first = cursor.token
        found[key] = (first, read_value(cursor))

    cursor.expect("{")
    cursor.separated(entry, "}")
    return found


def read_type(cursor: Cursor) -> TensorType:
    """A type like `tensor<2x3xf32>`."""
    token = cursor.take("type", "a type like tensor<2x3xf32>")
    *sizes, dtype = token.text.removeprefix("tensor<").removesuffix(">").split("x")
    if dtype not in _DTYPES or not all(size.isdecimal() and len(size) < 19 for size in sizes):
        raise cursor.error("sizes and one of the types " + " ".join(_DTYPES), token)
    return tensor_type(tuple(map(int, sizes)), _DTYPES[dtype])


def read_dtype(cursor: Cursor) -> DType:
    """An element type like `f32`."""
    token = cursor.take("word", "an element type like f32")
    if token.text not in _DTYPES:
        raise cursor.error("one of the types " + " ".join(_DTYPES), token)
    return _DTYPES[token.text]


def read_bytes(cursor: Cursor) -> bytes:
    """Bytes like `0x00FF`."""
    token = cursor.take("hex", "bytes like 0x00FF")
    if len(token.text) % 2:
        raise cursor.error("two hexadecimal digits per byte", token)
    return bytes.fromhex(token.text[2:])


def read_affine(cursor: Cursor) -> Affine:
    """`8+4*r3` and the like: a number, then registers in ascending order."""
    const = 0 if cursor.following.text == "*" else cursor.integer("a number")
    terms: list[tuple[int, int]] = []
    while cursor.accept("+") or cursor.following.text == "*":
        factor = cursor.integer("a number")
        cursor.expect("*")
        terms.append((_read_register(cursor), factor))
    return Affine(const, tuple(terms))


def _read_register(cursor: Cursor) -> int:
    token = cursor.take("word", "a register like r3")
    if not (token.text.startswith("r") and token.text[1:].isdecimal() and len(token.text) < 19):
        raise cursor.error("a register like r3", token)
    return int(token.text[1:])


def _read_view(cursor: Cursor) -> View:
    tensor = cursor.integer("the number of a tensor")
    cursor.expect("+")
    offset = read_affine(cursor)
    return View(tensor, offset, read_integers(cursor, "strides like [64, 1]"))


def read_integers(cursor: Cursor, what: str) -> tuple[int, ...]:
    """`[1, 2]` and the like."""
    if not cursor.accept("["):
        raise cursor.error(what)
    return tuple(cursor.separated(lambda: cursor.integer("a number"), "]"))


def _read_bound(cursor: Cursor) -> Any:
    return from_fields(cursor, cursor.token, Bound, read_mapping(cursor), "a bound")


_READERS: dict[str, Callable[[Cursor], Any]] = {
    "mark": _read_marked,
    "word": _read_word,
    "string": lambda cursor: cursor.string("a string"),
    "type": read_type,
    "hex": read_bytes,
    "float": _read_float,
}
"""How a value is read, by the kind of its first token; any other is a whole number."""
