"""Graphs from their text (`text.to_text`), and from what people write in that form.

    main(%x: tensor<4xf32>) {
      %one = constant 1.0 : tensor<4xf32>
      %sum = add %x, %one : tensor<4xf32> loc("net.py":7)
      return %sum
    }

Values have any name, comments start with `//`. Names, attributes and their types are checked
against the registered ops here; whether the types fit each other is for `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops.shape import ConstantAttrs
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value
from shardwright.compiler.support.fields import hints
from shardwright.compiler.text.elements import read_element
from shardwright.compiler.text.fields import Given, from_fields
from shardwright.compiler.text.lexer import Cursor, Token
from shardwright.compiler.text.values import read_bytes, read_mapping, read_type

ELIDED = "SW_TEXT_ELIDED"
FILE = "<text>"
CONSTANT = "constant"

Names = dict[str, Value]
Note = Callable[[Cursor, Value], None]


def parse(text: str, name: str = FILE) -> Graph:
    """The graph of `text`; `name` is the file that errors point at.

    Raises: UsageError SW_TEXT_SYNTAX at the line and column that do not fit, SW_TEXT_ELIDED where
    a constant was left out.
    """
    cursor = Cursor(text, name)
    graph = read_graph(cursor)
    cursor.end()
    return graph


def read_graph(cursor: Cursor, note: Note = lambda cursor, value: None) -> Graph:
    """The graph that stands next; `note` reads what stands behind the type of a value. Raises as
    `parse`.
    """
    name = cursor.name("the name of a graph")
    names: Names = {}
    cursor.expect("(")
    inputs = tuple(cursor.separated(lambda: _input(cursor, names, note), ")"))
    cursor.expect("{")
    ops: list[Op] = []
    with cursor.nested():
        while not cursor.accept("return"):
            ops.append(_op(cursor, names, note))
    outputs = _values(cursor, names)
    cursor.expect("}")
    return Graph(inputs, tuple(ops), outputs, name)


def _input(cursor: Cursor, names: Names, note: Note) -> Value:
    name = _new_name(cursor, names)
    cursor.expect(":")
    names[name] = _typed(cursor, note)
    return names[name]


def _typed(cursor: Cursor, note: Note) -> Value:
    value = Value(read_type(cursor))
    note(cursor, value)
    return value


def _new_name(cursor: Cursor, names: Names) -> str:
    token = cursor.take("value", "a value like %0")
    if token.text in names:
        raise cursor.error("a name that no other value of this level has", token)
    return token.text


def _values(cursor: Cursor, names: Names) -> tuple[Value, ...]:
    """Values that exist, with commas between them; none where none stands."""
    found: list[Value] = []
    while cursor.token.kind == "value" or found:
        token = cursor.take("value", "a value like %0")
        if token.text not in names:
            raise cursor.error("a value defined before, on the same level", token)
        found.append(names[token.text])
        if not cursor.accept(","):
            break
    return tuple(found)


def _op(cursor: Cursor, names: Names, note: Note) -> Op:
    result_names = _result_names(cursor, names)
    token = cursor.token
    name = cursor.name("an op or `return`")
    if name not in OPS:
        raise cursor.error("the name of a known op, or `return`", token)
    operands = _values(cursor, names)
    place = cursor.place
    given = read_mapping(cursor) if cursor.at("{") else None
    if given is None and name == CONSTANT:
        cursor.skip_to(":")  # elements are read when their type is known
    results = _results(cursor, len(result_names), note)
    types = [value.type for value in results]
    if given is None:
        attrs = _constant(cursor, place, types[0]) if name == CONSTANT and types else None
    else:
        attrs = _attrs(cursor, token, given, types)
    loc = _loc(cursor) if cursor.at("loc") else UNKNOWN_LOC
    op = Op(name, operands, results, attrs, _regions(cursor, note), loc)
    names.update(zip(result_names, results, strict=True))
    return op


def _result_names(cursor: Cursor, names: Names) -> list[str]:
    found: list[str] = []
    while cursor.token.kind == "value":
        token = cursor.token
        found.append(_new_name(cursor, names))
        if found.count(token.text) > 1:
            raise cursor.error("a name that no other value of this level has", token)
        if not cursor.accept(","):
            cursor.expect("=")
            break
    return found


def _results(cursor: Cursor, count: int, note: Note) -> tuple[Value, ...]:
    """As many values, with their types."""
    values: list[Value] = []
    for number in range(count):
        cursor.expect("," if number else ":")
        values.append(_typed(cursor, note))
    return tuple(values)


def _attrs(cursor: Cursor, token: Token, given: Given, types: Sequence[TensorType]) -> Any:
    """The attributes of the op named by `token`; a type that is not said is the only result's."""
    cls = OPS[token.text].attrs
    if cls is None:
        raise cursor.error("an op with attributes", token)
    if len(types) == 1 and hints(cls).get("type") is TensorType:
        given.setdefault("type", (token, types[0]))
    return from_fields(cursor, token, cls, given, token.text)


def _constant(cursor: Cursor, place: int, type: TensorType) -> ConstantAttrs:
    """The attributes of the constant whose elements stand at `place`."""
    behind = cursor.place
    cursor.back_to(place)
    data = _elements(cursor, type)
    cursor.expect(":")
    cursor.back_to(behind)
    return ConstantAttrs(data, type)


def _elements(cursor: Cursor, type: TensorType) -> bytes:
    if cursor.accept("dense"):
        return _dense(cursor, type)
    if cursor.at("["):
        return _list(cursor, type.shape, type.dtype)
    return read_element(cursor, type.dtype)


def _dense(cursor: Cursor, type: TensorType) -> bytes:
    cursor.expect("<")
    if cursor.at("elided"):
        raise cursor.error("all elements of a constant", code=ELIDED)
    token = cursor.token
    data = read_bytes(cursor)
    if len(data) != type.num_bytes:
        raise cursor.error(f"{type.num_bytes} bytes for {type}", token)
    cursor.expect(">")
    return data


def _list(cursor: Cursor, shape: tuple[int, ...], dtype: DType) -> bytes:
    """Elements in lists, one level per dim."""
    if not shape:
        return read_element(cursor, dtype)
    token = cursor.expect("[")
    rows = cursor.separated(lambda: _list(cursor, shape[1:], dtype), "]")
    if len(rows) != shape[0]:
        raise cursor.error(f"a list of {shape[0]}, got {len(rows)} entries", token)
    return b"".join(rows)


def _loc(cursor: Cursor) -> Loc:
    cursor.expect("loc")
    cursor.expect("(")
    file = cursor.string("a file in quotes")
    cursor.expect(":")
    line = cursor.integer("a line")
    scope = cursor.string("a scope in quotes") if cursor.accept(",") else ""
    cursor.expect(")")
    return Loc(file, line, scope)


def _regions(cursor: Cursor, note: Note) -> tuple[Graph, ...]:
    regions: list[Graph] = []
    while cursor.token.kind in ("word", "string") and cursor.following.text == "(":
        regions.append(read_graph(cursor, note))
    return tuple(regions)
