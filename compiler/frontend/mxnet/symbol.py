"""A symbol of MXNet as nodes and values, read from its JSON and the file of its parameters.

`nodes` are variables (`null`) and operators, each with the nodes before it whose results it takes:
[node, result, version]. Attributes are texts in every release; where they stand in a node is not.
Parameters are what the file beside has a value of; other variables are inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.frontend.graphs import errors
from shardwright.compiler.frontend.graphs.graph import Graph, Model, Node, Value
from shardwright.compiler.frontend.graphs.types import Array
from shardwright.compiler.frontend.locations import MODULE_FILE
from shardwright.compiler.frontend.mxnet.operators import MXNET
from shardwright.compiler.frontend.mxnet.parameters import file_beside, named, read_parameters
from shardwright.compiler.frontend.mxnet.start import FORM
from shardwright.compiler.support.documents import parse_json

SAMPLES = "batch"
"""What the first dim of an input is called whose size a symbol leaves open."""
VARIABLE = "null"
MOST_RESULTS = 65536
"""Results of a node (our choice)."""
_WORDS = {"true": True, "false": False, "none": None}
_WHOLE = re.compile(r"[+-]?\d{1,19}L?")
_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|nan)", re.I)
_AUXILIARY = {"BatchNorm": ("moving_mean", "moving_var")}
"""Operands that releases before 0.9 leave out: they are parameters by the name of the node."""


def read_model(data: bytes, file: str = MODULE_FILE) -> Model:
    """The model of a symbol's file, its content; `file` is what places in it are called, and where
    the file of its parameters lies beside.

    Raises: ImportRuleError SW_MODEL_FILE for damage of either, SW_MODEL_TYPE for values that are
    no dense arrays of numbers.
    """
    try:
        found = parse_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise _damaged(f"a file that is no JSON ({error})") from error
    path = file_beside(Path(file))
    parameters = read_parameters(path.read_bytes(), str(path)) if path is not None else {}
    return Model(FORM, MXNET, _Symbol(found, parameters).graph(), 0, file)


def _damaged(given: str, number: int = 0, scope: str = "") -> ImportRuleError:
    return errors.damaged(given, FORM, Loc(MODULE_FILE, number, scope) if number else None)


def value_of(text: str) -> Any:
    """What the text of an attribute means: yes or no, a number, a tuple of those, or the text."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text.rstrip("L"))
    if _NUMBER.fullmatch(text):
        return float(text)
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        parts = text[1:-1].split(",")
        return tuple(value_of(part) for part in parts if part.strip())
    return text


@dataclass(frozen=True)
class _Symbol:
    """The content of a symbol's file, and parameters by name."""

    found: Any
    parameters: Mapping[str, Array]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Its nodes, each with a name and an operator."""
        rows = self._list("nodes")
        for number, row in enumerate(rows, 1):
            is_node = isinstance(row, dict) and isinstance(row.get("inputs"), list)
            if not is_node or not all(isinstance(row.get(key), str) for key in ("op", "name")):
                raise _damaged(f"node {number} without op, name and inputs", number)
        return rows

    def _list(self, key: str) -> list[Any]:
        found = self.found.get(key) if isinstance(self.found, dict) else None
        if not isinstance(found, list) or not found:
            raise _damaged(f"a symbol without {key}")
        return found

    def _attributes(self, number: int) -> dict[str, str]:
        """Attributes of a node, wherever its release has them."""
        row = self.rows[number]
        found: dict[str, str] = {}
        for key in ("param", "attr", "attrs"):
            part = row.get(key, {})
            if not isinstance(part, dict) or not all(isinstance(v, str) for v in part.values()):
                raise self._of_node(number, f"{key} that are no texts by name")
            found |= part
        return found

    def _of_node(self, number: int, given: str) -> ImportRuleError:
        row = self.rows[number]
        scope = f"{row['op']} {row['name']}"
        return _damaged(f"{scope}, node {number + 1}, with {given}", number + 1, scope)

    def _place(self, entry: Any, before: int) -> tuple[int, int] | None:
        """(node, result) of an entry; None for what is none of a node in front of another."""
        if not isinstance(entry, list) or len(entry) < 2:
            return None
        node, result = entry[0], entry[1]
        if type(node) is not int or type(result) is not int:
            return None
        is_there = 0 <= node < before and 0 <= result < MOST_RESULTS
        return (node, result) if is_there else None

    @cached_property
    def operands(self) -> list[list[tuple[int, int]]]:
        """Of each node what it takes."""
        found = []
        for number, row in enumerate(self.rows):
            own = []
            for entry in row["inputs"]:
                place = self._place(entry, number)
                if place is None:
                    given = f"an input {entry!r:.60}, which no node in front of it makes"
                    raise self._of_node(number, given)
                own.append(place)
            if own and row["op"] == VARIABLE:
                raise self._of_node(number, "inputs, which a variable has none of")
            found.append(own)
        return found

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """What the symbol's results are."""
        found = []
        for entry in self._list("heads"):
            place = self._place(entry, len(self.rows))
            if place is None:
                raise _damaged(f"a head {entry!r:.60}, which no node makes")
            found.append(place)
        return found

    @cached_property
    def counts(self) -> list[int]:
        """How many results of each node are used."""
        counts = [1] * len(self.rows)
        for node, result in (*(p for own in self.operands for p in own), *self.heads):
            counts[node] = max(counts[node], result + 1)
        return counts

    @cached_property
    def names(self) -> dict[tuple[int, int], str]:
        """(node, result) -> its name: as MXNet calls it, and with its place where two have one."""
        counts = self.counts
        found: dict[tuple[int, int], str] = {}
        taken = {row["name"] for row in self.rows if row["op"] == VARIABLE}
        for number, row in enumerate(self.rows):
            if row["op"] == VARIABLE:
                if counts[number] > 1:
                    raise self._of_node(number, f"{counts[number]} results")
                found[number, 0] = row["name"]
                continue
            for result in range(counts[number]):
                which = str(result) if counts[number] > 1 else ""
                name = f"{row['name']}_output{which}"
                name = f"{name}@{number + 1}" if name in taken else name
                taken.add(name)
                found[number, result] = name
        return found

    def graph(self) -> Graph:
        """The nodes that results depend on, and variables as inputs and constants."""
        needed = self._needed()
        nodes = tuple(self._node(n) for n in needed if self.rows[n]["op"] != VARIABLE)
        variables = {self.rows[n]["name"]: n for n in needed if self.rows[n]["op"] == VARIABLE}
        used = {name for node in nodes for name in node.inputs} | set(variables)
        constants = {name: self.parameters[name] for name in self.parameters if name in used}
        rest = {name: number for name, number in variables.items() if name not in constants}
        inputs = tuple(self._input(name, number) for name, number in rest.items())
        outputs = tuple(Value(self.names[place], None, None) for place in self.heads)
        return Graph("symbol", nodes, inputs, outputs, constants)

    def _needed(self) -> Sequence[int]:
        """Nodes that results depend on, in order."""
        found = {node for node, _ in self.heads}
        for number in range(len(self.rows) - 1, -1, -1):
            if number in found:
                found.update(node for node, _ in self.operands[number])
        return sorted(found)

    def _node(self, number: int) -> Node:
        row = self.rows[number]
        said = {
            name: value_of(text)
            for name, text in self._attributes(number).items()
            if not name.startswith("__")
        }
        inputs = [self.names[place] for place in self.operands[number]]
        inputs += self._auxiliary(row, len(inputs))
        outputs = tuple(self.names[number, result] for result in range(self.counts[number]))
        return Node(row["op"], row["name"], "", number + 1, tuple(inputs), outputs, said)

    def _auxiliary(self, row: Mapping[str, Any], given: int) -> Iterator[str]:
        if row["op"] in _AUXILIARY and given == 3:
            names = (f"{row['name']}_{part}" for part in _AUXILIARY[row["op"]])
            yield from (name for name in names if name in self.parameters)

    def _input(self, name: str, number: int) -> Value:
        said = self._attributes(number)
        dtype, shape = value_of(said.get("__dtype__", "0")), value_of(said.get("__shape__", "None"))
        if not isinstance(dtype, int):
            raise self._of_node(number, f"__dtype__ {dtype!r:.60}, which is no number of a type")
        what = f"input {name}"
        own = np.dtype(np.float32) if dtype < 0 else named(dtype, what)
        if shape is None:
            return Value(name, own, None)
        if not isinstance(shape, tuple) or not all(type(dim) is int for dim in shape):
            raise self._of_node(number, f"__shape__ {shape!r:.60}, which is no list of sizes")
        dims = tuple(dim if dim > 0 else "" if n else SAMPLES for n, dim in enumerate(shape))
        return Value(name, own, dims)
