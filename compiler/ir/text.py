"""Graphs as short text for people: dumps, errors and tests. Every graph has one, collectives and
global types included.

The form is not read back; `serialize` is what crosses processes and `printer` is what other tools
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from compiler.diagnostics import UNKNOWN_LOC
from compiler.dtypes import DType
from compiler.ir.ops.shape import ConstantAttrs
from compiler.ir.types import Graph, Op, Value

MAX_CONSTANT_ELEMENTS = 8


def to_text(graph: Graph, with_locs: bool = False) -> str:
    """One line per op, values numbered per level, regions indented."""
    return "\n".join(_level(graph, 0, with_locs)) + "\n"


def op_text(op: Op, names: dict[Value, str] | None = None, with_locs: bool = False) -> str:
    """One op on one line, regions left out; values without a name show as `_`."""
    names = names or {}
    results = ", ".join(names.get(v, "_") for v in op.results)
    operands = " ".join(names.get(v, "_") for v in op.operands)
    types = ", ".join(str(v.type) for v in op.results)
    where = f"  // {op.loc}" if with_locs and op.loc != UNKNOWN_LOC else ""
    head = f"{results} = {op.name}" if results else op.name
    parts = [head, operands, _attributes(op.attrs)]
    return f"{' '.join(p for p in parts if p)} : {types}{where}"


def _level(graph: Graph, depth: int, with_locs: bool) -> Iterator[str]:
    pad, names = "  " * depth, {}
    for i, value in enumerate(graph.inputs):
        names[value] = f"%in{i}"
    count = 0
    shown = ", ".join(f"{names[v]}: {v.type}" for v in graph.inputs)
    yield f"{pad}{graph.name}({shown}) {{"
    for op in graph.ops:
        for value in op.results:
            names[value] = f"%{count}"
            count += 1
        yield f"{pad}  {op_text(op, names, with_locs)}"
        for region in op.regions:
            yield from _level(region, depth + 2, with_locs)
    yield f"{pad}  return {', '.join(names.get(v, '_') for v in graph.outputs)}"
    yield f"{pad}}}"


def _attributes(attrs: Any) -> str:
    if attrs is None:
        return ""
    if isinstance(attrs, ConstantAttrs):
        return _constant(attrs)
    given = {f.name: getattr(attrs, f.name) for f in fields(attrs)}
    said = {name: value for name, value in given.items() if value is not False and value != ()}
    shown = [f"{name}={_value(value)}" for name, value in said.items()]
    return f"{{{', '.join(shown)}}}"


def _value(value: object) -> str:
    return value.value if isinstance(value, DType) else str(value).replace(" ", "")


def _constant(attrs: ConstantAttrs) -> str:
    if attrs.is_splat:
        return f"{attrs.array().flat[0]}" if attrs.type.num_elements else "empty"
    if attrs.type.num_elements <= MAX_CONSTANT_ELEMENTS:
        return str(attrs.array().tolist()).replace(" ", "")
    return f"<{len(attrs.data)} bytes>"
