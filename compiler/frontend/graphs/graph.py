"""A graph of operators as its nodes and tensors, whatever file it was read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.compiler.frontend.graphs.form import Form
from shardwright.compiler.frontend.graphs.types import Array

if TYPE_CHECKING:
    from shardwright.compiler.frontend.graphs.table import Operators, Row


@dataclass(frozen=True, slots=True)
class Reference:
    """An attribute of a function's node: the attribute of that name of the call."""

    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """A node: `number` is its place in its graph from 1, `attributes` are values by name; operands
    and results that are left out have the name ""."""

    operator: str
    name: str
    domain: str
    number: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def scope(self) -> str:
        """What messages call it."""
        return f"{self.operator} {self.name}".strip()

    @property
    def graphs(self) -> Iterator[Graph]:
        """Branches and bodies."""
        return (value for value in self.attributes.values() if isinstance(value, Graph))


@dataclass(frozen=True, slots=True)
class Value:
    """An input or a result of a graph; a dim without a number is its name, "" where it has none.
    Of the inputs of a body nothing else than the name may be known."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in an order in which they can be computed; `constants` are its initializers,
    `declared` values inside of it whose types a tolerant reader was told."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: Mapping[str, Array]
    declared: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Function:
    """An operator that the model brings along."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    defaults: Mapping[str, Any]
    opset: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its form and table of operators, its graph, the release of the operators, what
    places in it call its file, and functions by (domain, name)."""

    form: Form
    operators: Operators
    graph: Graph
    opset: int
    file: str
    functions: Mapping[tuple[str, str], Function] = field(default_factory=dict)

    def find(self, node: Node) -> Row | None:
        """The row of a node's operator, of the release of the model."""
        return self.operators.find(node.operator, self.opset)


def every(nodes: Sequence[Node]) -> Iterator[Node]:
    """Nodes, and those of the graphs in them."""
    for node in nodes:
        yield node
        for graph in node.graphs:
            yield from every(graph.nodes)


def every_node(model: Model) -> Iterator[Node]:
    """All nodes of a model: of its graph, of branches and bodies, and of functions."""
    yield from every(model.graph.nodes)
    for function in model.functions.values():
        yield from every(function.nodes)
