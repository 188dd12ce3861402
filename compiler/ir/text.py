"""Graphs as text that people read and `parse` reads back: dumps, tests, one pass on one file.

Values are numbered per level in program order, attributes are `key=value`, types are StableHLO's,
so equal graphs have equal text. Every graph has one, collectives and global types included;
`printer` is what other tools read and `serialize` what crosses processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.ops.shape import ConstantAttrs
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value
from shardwright.compiler.text.elements import element_text
from shardwright.compiler.text.fields import field_values
from shardwright.compiler.text.lexer import name_text
from shardwright.compiler.text.values import mapping_text

MAX_LISTED_ELEMENTS = 16  # of a constant; a longer one is a row of bytes (our choice)
MAX_SHOWN_BYTES = 256  # of a row of bytes in a text for people (our choice)
UNDEFINED = "_"


def to_text(graph: Graph, with_locs: bool = False, elide: bool = False) -> str:
    """One line per op, regions indented.

    With `elide`, long constants are their size and digest: text for people, which `parse` refuses.
    """
    return "\n".join(Printer(with_locs, elide).level(graph, 0)) + "\n"


def annotated_text(
    graph: Graph, remark: Callable[[Value], str], place: Callable[[Loc], Loc] = lambda loc: loc
) -> str:
    """The text with locations as `place` tells them, and remarks on values as comments, which
    `parse` skips.
    """
    return "\n".join(Printer(with_locs=True, remark=remark, place=place).level(graph, 0)) + "\n"


@dataclass(frozen=True, slots=True)
class Printer:
    """Lines of a graph; `note` is what stands behind the type of a value, `remark` what a comment
    says of it, `place` where an op comes from.
    """

    with_locs: bool = False
    elide: bool = False
    note: Callable[[Value], str] = lambda _: ""
    remark: Callable[[Value], str] = lambda _: ""
    place: Callable[[Loc], Loc] = lambda loc: loc

    def level(self, graph: Graph, depth: int) -> Iterator[str]:
        """A graph or a region."""
        pad = "  " * depth
        names = {value: f"%in{i}" for i, value in enumerate(graph.inputs)}
        shown = ", ".join(f"{names[v]}: {v.type}{self.note(v)}" for v in graph.inputs)
        for value, name in names.items():
            yield from (f"{pad}// {name}: {said}" for said in (self.remark(value),) if said)
        yield f"{pad}{name_text(graph.name)}({shown}) {{"
        count = 0
        for op in graph.ops:
            line = self.op(op, names) + self.comment(op)
            for value in op.results:
                names[value] = f"%{count}"
                count += 1
            results = ", ".join(names[v] for v in op.results)
            yield f"{pad}  {results} = {line}" if results else f"{pad}  {line}"
            for region in op.regions:
                yield from self.level(region, depth + 2)
        returned = " ".join(("return", _listed(graph.outputs, names))).rstrip()
        yield f"{pad}  {returned}"
        yield f"{pad}}}"

    def comment(self, op: Op) -> str:
        """The remarks on the results of an op."""
        said = [text for value in op.results if (text := self.remark(value))]
        return f"  // {'; '.join(said)}" if said else ""

    def op(self, op: Op, names: Mapping[Value, str]) -> str:
        """An op without its results and regions."""
        parts = [name_text(op.name), _listed(op.operands, names), self.attributes(op)]
        if op.results:
            parts += [":", ", ".join(f"{v.type}{self.note(v)}" for v in op.results)]
        if self.with_locs and (loc := self.place(op.loc)) != UNKNOWN_LOC:
            parts.append(loc_text(loc))
        return " ".join(part for part in parts if part)

    def attributes(self, op: Op) -> str:
        """`{key=value}`; a type that is the result's is said once."""
        if op.attrs is None:
            return ""
        typed = [v.type for v in op.results] == [getattr(op.attrs, "type", None)]
        if isinstance(op.attrs, ConstantAttrs) and typed:
            return self.constant(op.attrs.data, op.attrs.type)
        given: dict[str, Any] = field_values(op.attrs)
        if typed:
            given.pop("type")
        return mapping_text(given)

    def constant(self, data: bytes, type: TensorType) -> str:
        """The element of a splat, a list of a few, or bytes."""
        width, dtype = type.dtype.bytes, type.dtype
        if len(data) == width:
            return element_text(data, dtype)
        if len(data) == type.num_bytes and type.num_elements <= MAX_LISTED_ELEMENTS:
            every = [element_text(data[i : i + width], dtype) for i in range(0, len(data), width)]
            return _nested(every, type.shape)
        if self.elide and len(data) > MAX_SHOWN_BYTES:
            return f"dense<elided {len(data)} bytes {hashlib.sha256(data).hexdigest()[:12]}>"
        return f"dense<0x{data.hex().upper()}>"


def _listed(values: tuple[Value, ...], names: Mapping[Value, str]) -> str:
    return ", ".join(names.get(v, UNDEFINED) for v in values)


def _nested(elements: list[str], shape: tuple[int, ...]) -> str:
    """A list of `elements`, as many levels deep as `shape` has dims."""
    for size in reversed(shape[1:]):
        starts = range(0, len(elements), size or 1)
        elements = [f"[{', '.join(elements[i : i + size])}]" for i in starts]
    return f"[{', '.join(elements)}]"


def loc_text(loc: Loc) -> str:
    """`loc("net.py":7, "scope")`; no scope, no comma."""
    scope = f", {json.dumps(loc.scope)}" if loc.scope else ""
    return f"loc({json.dumps(loc.file)}:{loc.line}{scope})"
