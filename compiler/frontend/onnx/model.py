"""An ONNX model as its nodes and tensors, read from a file's bytes and checked.

What is wrong with a file is told here, before anything of it is computed: values that nothing
makes or two nodes make, attributes that are none, tensors without their elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.frontend.graphs.errors import untyped
from shardwright.compiler.frontend.graphs.graph import (
    Function,
    Graph,
    Model,
    Node,
    Reference,
    Value,
    every,
)
from shardwright.compiler.frontend.locations import MODULE_FILE
from shardwright.compiler.frontend.onnx.errors import damaged
from shardwright.compiler.frontend.onnx.operators import ONNX
from shardwright.compiler.frontend.onnx.schema import MODEL, SCHEMA
from shardwright.compiler.frontend.onnx.start import FORM
from shardwright.compiler.frontend.onnx.tensors import array_of, type_of
from shardwright.compiler.frontend.onnx.wire import DamagedError, Message, read

OPSETS = range(7, 22)
"""Releases of the operators that have rows."""
OWN = ("", "ai.onnx")
"""Names of the domain of ONNX's own operators."""
MOST_NODES = 1_000_000
"""Nodes of a function with those that it calls (our choice: some minutes of tracing)."""
_MOST_TEXT = 60


@dataclass(frozen=True, slots=True)
class Untaken:
    """A constant or an attribute that is no tensor of numbers, and what it is."""

    reason: str


def read_model(data: bytes, file: str = MODULE_FILE, *, is_tolerant: bool = False) -> Model:
    """The model of a file, its content; `file` is what places in it are called, and where the files
    of its weights lie beside. Where `is_tolerant`, values that are no tensors of numbers are
    `Untaken`, those of a graph have no type.

    Raises: ImportRuleError SW_MODEL_FILE for damage, SW_MODEL_TYPE for values that are no tensors
    of numbers, SW_MODEL_OPERATOR for a release without rows.
    """
    try:
        found = read(data, MODEL, SCHEMA)
    except DamagedError as error:
        raise damaged(str(error)) from error
    if found["graph"] is None:
        raise damaged("a file without a graph")
    opset = _opset(found["opsets"], "the model")
    reader = _Reader(Path(file).parent, is_tolerant)
    functions = {
        (each["domain"], each["name"]): reader.function(each, opset) for each in found["functions"]
    }
    _check_calls(functions)
    graph = reader.graph(found["graph"], frozenset())
    if not graph.outputs:
        raise damaged("a graph without results")
    return Model(FORM, ONNX, graph, opset, file, functions)


def _opset(rows: Sequence[Message], what: str, usual: int = 0) -> int:
    """The release of ONNX's own operators that is imported. Raises ImportRuleError."""
    versions = [row["version"] for row in rows if row["domain"] in OWN]
    version = int(versions[0]) if versions else usual
    if version in OPSETS:
        return version
    raise ImportRuleError(
        "SW_MODEL_OPERATOR",
        f"{what} requires operators of opset {OPSETS[0]} to {OPSETS[-1]}, got"
        f" {version or 'no opset'}",
        Loc(MODULE_FILE),
        f"export it with opset_version={OPSETS[-1]}, or convert it:"
        f" onnx.version_converter.convert_version(model, {OPSETS[-1]})",
    )


def _check_calls(functions: Mapping[tuple[str, str], Function]) -> None:
    """Refuse functions that call themselves, directly or not, and such as come to more nodes than
    anybody waits for."""
    sizes: dict[tuple[str, str], int] = {}
    waiting = {
        key: {(node.domain, node.operator) for node in every(function.nodes)} & set(functions)
        for key, function in functions.items()
    }
    while waiting:
        done = [key for key, called in waiting.items() if not called & set(waiting)]
        if not done:
            raise damaged(f"functions that call themselves: {', '.join(n for _, n in waiting)}")
        for key in done:
            calls = ((node.domain, node.operator) for node in every(functions[key].nodes))
            sizes[key] = sum(sizes.get(call, 1) for call in calls)
            if sizes[key] > MOST_NODES:
                raise damaged(f"function {key[1]} of {sizes[key]} nodes, with those it calls")
            del waiting[key]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads messages of a file in a folder."""

    folder: Path
    is_tolerant: bool = False

    def _taken(self, read: Callable[[], Any], otherwise: Callable[[str], Any] = Untaken) -> Any:
        """What is read; of what is no tensor of numbers, where that is tolerated, another value."""
        try:
            return read()
        except ImportRuleError as error:
            if not self.is_tolerant or error.code != "SW_MODEL_TYPE":
                raise
            return otherwise(error.diagnostic.message)

    def _tensor(self, found: Message) -> Any:
        return self._taken(lambda: array_of(found, self.folder))

    def _value(self, found: Message, what: str) -> Value:
        value: Value = self._taken(
            lambda: _value(found, what), lambda _: Value(found["name"], None, None)
        )
        return value

    def graph(self, found: Message, outer: Set[str]) -> Graph:
        """A graph, in which values of `outer` are known too."""
        if found["sparse"]:
            raise untyped(f"an initializer of graph {found['name']}", "a sparse tensor")
        constants = {each["name"]: self._tensor(each) for each in found["initializers"]}
        inputs = [self._value(each, "input") for each in found["inputs"]]
        given = tuple(each for each in inputs if each.name not in constants)
        names = [each.name for each in given]
        for name in (*names, *constants):
            if not name:
                raise damaged(f"an input or initializer of graph {found['name']!r} without a name")
        if len(set(names)) < len(names):
            raise damaged(f"two inputs of one name: {', '.join(names)}")
        known = {*outer, *names, *constants}
        nodes = self.nodes(found["nodes"], known)
        made = known.union(*(node.outputs for node in nodes))
        outputs = tuple(self._value(each, "result") for each in found["outputs"])
        for output in outputs:
            if output.name not in made:
                raise damaged(f"a result {output.name!r}, which no node makes")
        declared = [self._value(v, "value") for v in found["declared"] if self.is_tolerant]
        inner = {each.name: each for each in declared}
        return Graph(found["name"], nodes, given, outputs, constants, inner)

    def function(self, found: Message, opset: int) -> Function:
        """An operator of the model's own."""
        defaults = {each["name"]: self.attribute(each) for each in found["defaults"]}
        inputs, outputs = tuple(found["inputs"]), tuple(found["outputs"])
        nodes = self.nodes(found["nodes"], frozenset(inputs))
        missing = set(outputs) - set(inputs).union(*(node.outputs for node in nodes))
        if missing:
            raise damaged(f"result {missing.pop()!r} of function {found['name']}, which nothing is")
        own = _opset(found["opsets"], f"function {found['name']}", opset)
        return Function(inputs, outputs, nodes, defaults, own)

    def nodes(self, rows: Sequence[Message], known: Set[str]) -> tuple[Node, ...]:
        """Nodes, each of values that are known where it stands."""
        seen, made, nodes = set(known), set[str](), []
        for number, row in enumerate(rows, 1):
            node = self._node(row, number, seen)
            for name in node.inputs:
                if name and name not in seen:
                    raise damaged(f"{node.scope}, node {number}, of {name!r}, which is not there")
            for name in filter(None, node.outputs):
                if name in made:
                    raise damaged(f"{name!r}, which two nodes make: {number} is the second")
                made.add(name)
                seen.add(name)
            nodes.append(node)
        return tuple(nodes)

    def _node(self, row: Message, number: int, known: Set[str]) -> Node:
        if not row["operator"]:
            raise damaged(f"node {number} without an operator")
        attributes: dict[str, Any] = {}
        for each in row["attributes"]:
            if each["name"] in attributes:
                raise damaged(f"two attributes {each['name']!r} of node {number}")
            attributes[each["name"]] = self.attribute(each, known)
        inputs, outputs = tuple(row["inputs"]), tuple(row["outputs"])
        domain = "" if row["domain"] in OWN else row["domain"]
        return Node(row["operator"], row["name"], domain, number, inputs, outputs, attributes)

    def attribute(self, found: Message, known: Set[str] = frozenset()) -> Any:
        """The value of an attribute: a number, a text, an array, a graph, or a list of numbers or
        texts."""
        kind, name = found["type"], found["name"]
        if found["reference"]:
            return Reference(found["reference"])
        if kind in (_TENSOR, _GRAPH) and found[_FIELDS[kind]] is None:
            raise damaged(f"attribute {name!r} without its value")
        if kind == _TENSOR:
            return self._tensor(found["t"])
        if kind == _GRAPH:
            return self.graph(found["g"], known)
        if kind not in _FIELDS:
            if self.is_tolerant:
                return Untaken(f"attribute {name} is of kind {kind}")
            raise untyped(f"attribute {name}", f"a value of kind {kind}")
        value = found[_FIELDS[kind]]
        if kind in (_TEXT, _TEXTS):
            texts = [_text(each, name) for each in ([value] if kind == _TEXT else value)]
            return texts[0] if kind == _TEXT else tuple(texts)
        return tuple(value) if isinstance(value, list) else value


_TEXT, _TENSOR, _GRAPH, _TEXTS = 3, 4, 5, 8
_FIELDS = {1: "f", 2: "i", _TEXT: "s", _TENSOR: "t", _GRAPH: "g"} | {
    6: "floats",
    7: "ints",
    _TEXTS: "strings",
}
"""Kind of an attribute -> the field with its value. Source: `AttributeProto` of onnx.proto."""


def _text(value: Any, name: str) -> str:
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        raise damaged(f"attribute {name!r} of bytes that are no text") from None


def _value(found: Message, what: str) -> Value:
    """An input or a result as it is declared."""
    name, kind = found["name"], found["type"]
    if kind is None:
        return Value(name, None, None)
    if kind["tensor"] is None:
        raise untyped(f"{what} {name[:_MOST_TEXT]}", "a sequence, a map or an optional value")
    tensor = kind["tensor"]
    dtype = type_of(tensor["type"], f"{what} {name}") if tensor["type"] else None
    if tensor["shape"] is None:
        return Value(name, dtype, None)
    shape = tuple(_dim(dim, name) for dim in tensor["shape"]["dims"])
    return Value(name, dtype, shape)


def _dim(found: Message, name: str) -> int | str:
    """The size of a dim, or its name. A size of 0 that is written out reads as one that is not."""
    if found["size"] < 0:
        raise damaged(f"a dim of {found['size']} of {name}")
    return str(found["name"]) if found["name"] or not found["size"] else int(found["size"])
