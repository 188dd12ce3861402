"""Kernels as text that people read and `parse` reads back: the meaning of a nest of instructions.

    kernel compute dot_general loc 3 {
      iter_dims [4, 8, 16]
      %0 = load() {view=tensor 0+0[16, 0, 1]} : f32 over [0, 2]
      %1 = reduce(%0) {kind=add, over=[2]} : f32 over [0]
      %2 = store(%1) {view=tensor 2+0[1, 0, 0]} : f32 over [0]
    }

Nodes are numbered in order, stores among them. What an attribute means is in `kernel.py`; a listing
of a program (`compiler/neff/listing.py`) shows nodes in this form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.compiler.isa.kernel import KernelProgram, Node
from shardwright.compiler.text.lexer import Cursor, name_text
from shardwright.compiler.text.values import (
    mapping_text,
    read_dtype,
    read_integers,
    read_mapping,
    value_text,
)

FILE = "<text>"


def to_text(*programs: KernelProgram) -> str:
    """One kernel after the other, one line per node."""
    return "\n".join(line for program in programs for line in _lines(program)) + "\n"


def _lines(program: KernelProgram) -> Iterator[str]:
    where = f" loc {program.loc}" if program.loc != -1 else ""
    yield f"kernel {head_text(program)}{where} {{"
    yield from (f"  {line}" for line in body_lines(program))
    yield "}"


def head_text(program: KernelProgram) -> str:
    """Kind, name and attributes."""
    attrs = f" attributes{_attributes_text(program.attrs)}" if program.attrs else ""
    return f"{name_text(program.kind)} {name_text(program.name)}{attrs}"


def body_lines(program: KernelProgram) -> Iterator[str]:
    """The sizes of the iter dims, and every node."""
    if program.iter_dims:
        yield f"iter_dims {value_text(program.iter_dims)}"
    for number, node in enumerate(program.nodes):
        yield f"%{number} = {node_text(node)}"


def node_text(node: Node) -> str:
    """One node without its number."""
    inputs = ", ".join(f"%{i}" for i in node.inputs)
    head = f"{name_text(node.op)}({inputs}){_attributes_text(node.attrs)}"
    return f"{head} : {node.dtype.value} over {value_text(node.iter_dims)}"


def _attributes_text(attrs: Mapping[str, Any]) -> str:
    """Attributes in the order of their names, as files keep them; nothing for none."""
    return f" {mapping_text(dict(sorted(attrs.items())))}" if attrs else ""


def parse(text: str, name: str = FILE) -> tuple[KernelProgram, ...]:
    """The kernels of `text`; `name` is the file that errors point at.

    Raises: UsageError SW_TEXT_SYNTAX at the line and column that do not fit.
    """
    cursor = Cursor(text, name)
    programs: list[KernelProgram] = []
    while cursor.at("kernel"):
        programs.append(_program(cursor))
    cursor.end()
    return tuple(programs)


def _program(cursor: Cursor) -> KernelProgram:
    cursor.expect("kernel")
    kind, name = cursor.name("the kind of a kernel"), cursor.name("the name of a kernel")
    attrs = _attributes(cursor) if cursor.accept("attributes") else {}
    loc = cursor.integer("the ordinal of a location") if cursor.accept("loc") else -1
    cursor.expect("{")
    iter_dims = read_integers(cursor, "sizes like [4, 8]") if cursor.accept("iter_dims") else ()
    nodes: list[Node] = []
    numbers: dict[str, int] = {}
    while not cursor.accept("}"):
        token = cursor.take("value", "a node like %0, or `}`")
        if token.text in numbers:
            raise cursor.error("a name that no other node has", token)
        cursor.expect("=")
        nodes.append(_node(cursor, numbers))
        numbers[token.text] = len(numbers)
    return KernelProgram(kind, name, iter_dims, tuple(nodes), attrs, loc)


def _node(cursor: Cursor, numbers: Mapping[str, int]) -> Node:
    op = cursor.name("what a node computes")
    cursor.expect("(")
    inputs = tuple(cursor.separated(lambda: _input(cursor, numbers), ")"))
    attrs = _attributes(cursor) if cursor.at("{") else {}
    cursor.expect(":")
    dtype = read_dtype(cursor)
    cursor.expect("over")
    return Node(op, inputs, read_integers(cursor, "iter_dims like [0, 2]"), dtype, attrs)


def _input(cursor: Cursor, numbers: Mapping[str, int]) -> int:
    token = cursor.take("value", "a node like %0")
    if token.text not in numbers:
        raise cursor.error("a node before this one", token)
    return numbers[token.text]


def _attributes(cursor: Cursor) -> dict[str, Any]:
    return {key: value for key, (_, value) in read_mapping(cursor).items()}
