"""Damages of a file, found and addressed: `compiler.timing.evaluate:dma_time#term#0`.

An address is the module, the qualified symbol (function, method, or the name a constant is bound
to), the operator, and the number of the damage among those of that operator in that symbol. It says
nothing of lines, so it holds when code above moves; `resolve` finds a symbol that went to another
module as long as one module only has it. Numbers of JSON and TOML tables are addressed by path and
key.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from tests.mutants.operators import (
    Change,
    Node,
    Place,
    changes,
    children,
    other_numbers,
    substituted,
)

Number = tuple[tuple[str, ...], float, int, int]


@dataclass(frozen=True)
class Damage:
    """One change of one file: the characters from `start` to `end` become `text`."""

    path: str
    symbol: str
    operator: str
    ordinal: int
    line: int
    start: int
    end: int
    text: str

    @property
    def module(self) -> str:
        """Dotted name of a Python module; of a table its path."""
        return module_name(self.path)

    @property
    def address(self) -> str:
        return f"{self.module}:{self.symbol}#{self.operator}#{self.ordinal}"

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def diff(self, source: str) -> str:
        """What changes, without the lines around it."""
        lines = unified_diff(
            source.splitlines(), self.applied(source).splitlines(), lineterm="", n=0
        )
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def module_name(path: str) -> str:
    """`compiler/isa/costs.py` is `compiler.isa.costs`."""
    if not path.endswith(".py"):
        return path
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def damages_of(path: str, source: str) -> list[Damage]:
    """All damages of one file, in the order of its text."""
    found = _of_module(path, source) if path.endswith(".py") else _of_table(path, source)
    return sorted(found, key=lambda damage: (damage.start, damage.end))


def resolve(address: str, known: Iterable[Damage]) -> Damage:
    """The damage of an address; one whose symbol moved is found by the rest of the address.

    Raises KeyError when there is none, or when several modules have the symbol.
    """
    every = {damage.address: damage for damage in known}
    if address in every:
        return every[address]
    rest = address.partition(":")[2]
    moved = [d for a, d in every.items() if a.partition(":")[2] == rest]
    if len(moved) != 1:
        raise KeyError(f"{address}: {len(moved)} damages have this symbol, operator and number")
    return moved[0]


def symbols(tree: ast.Module, source: str) -> dict[str, tuple[int, int]]:
    """Where every function, method, class and constant begins and ends, by its qualified name."""
    text, found = _Text(source), dict[str, tuple[int, int]]()

    def walk(node: ast.AST, around: str, parents: Sequence[ast.AST]) -> None:
        for child in ast.iter_child_nodes(node):
            symbol = _symbol(child, around, (*parents, node))
            if symbol != around:
                assert isinstance(child, ast.stmt)
                found.setdefault(symbol, text.span(child, child))
            walk(child, symbol, (*parents, node))

    walk(tree, "", ())
    return found


def _of_module(path: str, source: str) -> Iterator[Damage]:
    text, numbers = _Text(source), Counter[tuple[str, str]]()
    for symbol, change in _walk(ast.parse(source), Place("", ()), None):
        named = (symbol or "<module>", change.operator)
        start, end, new = text.splice(change)
        yield Damage(path, *named, numbers[named], change.node.lineno, start, end, new)
        numbers[named] += 1


class _Text:
    """A source text by the positions of the syntax tree."""

    def __init__(self, source: str) -> None:
        self.source, self.lines, self.starts = source, source.splitlines(keepends=True), [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def place(self, line: int, column: int) -> int:
        """Columns of the syntax tree count bytes of UTF-8."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, first: Node, last: Node) -> tuple[int, int]:
        assert last.end_lineno is not None and last.end_col_offset is not None
        begin = self.place(first.lineno, first.col_offset)
        return begin, self.place(last.end_lineno, last.end_col_offset)

    def splice(self, change: Change) -> tuple[int, int, str]:
        """(start, end, new text); of a display over several lines only the element goes."""
        begin, end = self.span(change.node, change.node)
        if change.part is None or "\n" not in self.source[begin:end]:
            return begin, end, change.text
        begin, last = self.span(*change.part)
        comma = self.source.find(",", last, end)
        between = self.source[last:comma] if comma >= 0 else "no"
        if between.strip(" \n)"):
            return begin, last, ""
        # What closed a bracket about the element goes on closing it.
        return begin, comma + 1 if ")" not in between else last, ""


def _walk(node: ast.AST, place: Place, text: ast.JoinedStr | None) -> Iterator[tuple[str, Change]]:
    """Every change below a node. Nodes inside an f-string have no positions of their own, so the
    whole f-string is written anew.
    """
    for change in changes(node, place):
        if text is not None and text is not change.node:
            whole = ast.unparse(substituted(text, change.node, change.text))
            change = Change(change.operator, text, whole)
        yield place.symbol, change
    inner = text or (node if isinstance(node, ast.JoinedStr) else None)
    parents = (*place.parents, node)
    for child in children(node):
        yield from _walk(child, Place(_symbol(child, place.symbol, parents), parents), inner)


def _symbol(node: ast.AST, around: str, parents: Sequence[ast.AST]) -> str:
    """The symbol that a node opens, or the one around it."""
    name = ""
    inside = any(isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef) for p in parents)
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            pass
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            name = "" if inside else name
    return f"{around}.{name}".strip(".") if name else around


def _of_table(path: str, source: str) -> Iterator[Damage]:
    """Numbers under the keys `value` and `band`, each where it stands in the text."""
    numbers = numbers_of(source) if path.endswith(".json") else numbers_of_toml(source)
    for keys, value, start, end in numbers:
        if {"value", "band"} & set(keys):
            line = source.count("\n", 0, start) + 1
            for ordinal, other in enumerate(other_numbers(value)):
                symbol = ".".join(keys)
                yield Damage(path, symbol, "number", ordinal, line, start, end, json.dumps(other))


def numbers_of_toml(source: str) -> Iterator[Number]:
    """The same of a TOML text whose tables have a number, or a list of numbers, a line."""
    section = ""
    for row in re.finditer(r"^\[(\w+)\]|^(\w+) *= *(\[?)([-\d.e, ]+)\]?$", source, re.MULTILINE):
        section = row[1] or section
        for at, found in enumerate(re.finditer(r"[-\d.e]+", row[4] or "")):
            begin, end = row.start(4) + found.start(), row.start(4) + found.end()
            place = (str(at),) if row[3] else ()
            yield (section, row[2], *place), json.loads(found[0]), begin, end


def numbers_of(source: str) -> Iterator[Number]:
    """(keys, number, start, end) of every number of a JSON text, in its order."""
    decoder, at = json.JSONDecoder(), 0
    keys: list[str] = []
    counts: list[int | None] = []  # place in a list, None in an object
    while at < len(source):
        mark = source[at]
        if mark in "{[":
            counts.append(0 if mark == "[" else None)
            keys.append("0" if mark == "[" else "")
        elif mark in "}]":
            counts.pop()
            keys.pop()
        elif mark == "," and counts[-1] is not None:
            counts[-1] += 1
            keys[-1] = str(counts[-1])
        elif mark == '"' or mark.isalnum() or mark == "-":
            value, end = decoder.raw_decode(source, at)
            if isinstance(value, str) and source[end:].lstrip().startswith(":"):
                keys[-1] = value
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield tuple(keys), value, at, end
            at = end
            continue
        at += 1


def read_damages(root: Path, paths: Iterable[str]) -> list[Damage]:
    """All damages of several files, ordered by path and place."""
    return [d for path in paths for d in damages_of(path, (root / path).read_text())]
