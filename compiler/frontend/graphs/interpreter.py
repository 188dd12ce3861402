"""A graph of operators as a function of arrays.

What is known while the graph is traced is computed in NumPy (shapes, above all), the rest by JAX,
below a frame that has the number of the node as its line.
"""

from __future__ import annotations

import inspect
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import ImportRuleError, Loc, did_you_mean
from shardwright.compiler.frontend.graphs.errors import at_node, of_values, unfit
from shardwright.compiler.frontend.graphs.graph import Graph, Model, Node, Reference, every_node
from shardwright.compiler.frontend.graphs.table import (
    MOST_FOLDED,
    Call,
    Function,
    Row,
    Training,
    is_known,
)
from shardwright.compiler.frontend.graphs.types import computed_type, narrowed
from shardwright.compiler.frontend.written_at import called_at

MOST_NAMED = 5
Values = MutableMapping[str, Any]


def check_operators(model: Model) -> None:
    """Raise ImportRuleError for operators without a row, all of them at once."""
    own = {name for _, name in model.functions}
    without = [node for node in every_node(model) if not _has_row(model, node)]
    if not without:
        return
    lines = [f"{_title(node)} ({node.scope}, node {node.number})" for node in without]
    more = f" and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
    first = without[0]
    known = {row.operator for row in model.operators} | own
    raise ImportRuleError(
        "SW_MODEL_OPERATOR",
        f"operators with a row{_release(model)} ({model.form.page}) are required, got"
        f" {', '.join(lines[:MOST_NAMED])}{more}",
        Loc(model.file, first.number, first.scope),
        did_you_mean(first.operator, known, "export the model with other operators"),
    )


def _release(model: Model) -> str:
    """The words for the release of a model's operators, where a form has several."""
    return f" in opset {model.opset}" if model.opset else ""


def _title(node: Node) -> str:
    return f"{node.domain}.{node.operator}" if node.domain else node.operator


def _has_row(model: Model, node: Node) -> bool:
    if (node.domain, node.operator) in model.functions:
        return True
    return not node.domain and model.find(node) is not None


def evaluate(model: Model, given: Mapping[str, Any], training: Training | None = None) -> list[Any]:
    """The results of a model's graph from values of its inputs, and of its weights, by name;
    initializers that are not given are constants. `training` is told what a step is trained for.

    Raises ImportRuleError at the node.
    """
    run = _Run(model, model.opset, training=training)
    known: Values = {**model.graph.constants, **given}
    run.nodes(model.graph.nodes, known)
    return [known[output.name] for output in model.graph.outputs]


def results_of(model: Model, node: Node, known: Mapping[str, Any]) -> dict[str, Any]:
    """The results of one node of a model's graph by name, from values by name, those that its
    branches and bodies read among them. Raises ImportRuleError at the node."""
    values: Values = dict(known)
    _Run(model, model.opset).nodes((node,), values)
    return {name: values[name] for name in node.outputs if name}


def has_rows(model: Model, node: Node) -> bool:
    """Whether a node, and all that is in it, has rows."""
    if not _has_row(model, node):
        return False
    function = model.functions.get((node.domain, node.operator))
    inside = [*(function.nodes if function else ()), *(n for g in node.graphs for n in g.nodes)]
    return all(has_rows(model, each) for each in inside)


def reads(node: Node) -> tuple[str, ...]:
    """Names of values that a node reads, each once; of its branches and bodies those from around
    them."""
    names = dict.fromkeys(filter(None, node.inputs))
    for graph in node.graphs:
        own = {*graph.constants, *(each.name for each in graph.inputs)}
        for inner in graph.nodes:
            names |= dict.fromkeys(name for name in reads(inner) if name not in own)
            own |= set(inner.outputs)
        names |= dict.fromkeys(each.name for each in graph.outputs if each.name not in own)
    return tuple(names)


@dataclass(frozen=True, slots=True)
class _Run:
    """How nodes are computed: with the operators of a release, and the attributes of the call of
    a function that they are in."""

    model: Model
    opset: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    training: Training | None = None

    def nodes(self, nodes: Sequence[Node], known: Values) -> None:
        """Add the results of nodes to what is known."""
        for node in nodes:
            with at_node(self.model, node):
                operands = [known[name] if name else None for name in node.inputs]
                results = self._results(self._resolved(node), operands, known)
                names = node.outputs
                if len(results) < len(names) and any(names[len(results) :]):
                    raise unfit(f"at most {len(results)} results", str(len(names)))
                known.update((n, r) for n, r in zip(names, results, strict=False) if n)

    def _resolved(self, node: Node) -> Node:
        """A node with the attributes that it takes of the call of its function."""
        if not any(isinstance(value, Reference) for value in node.attributes.values()):
            return node
        found = {
            name: self.attributes.get(value.name) if isinstance(value, Reference) else value
            for name, value in node.attributes.items()
        }
        return replace(node, attributes={n: v for n, v in found.items() if v is not None})

    def _results(self, node: Node, operands: list[Any], known: Values) -> Sequence[Any]:
        function = self.model.functions.get((node.domain, node.operator))
        if function is not None:
            attributes = {**function.defaults, **node.attributes}
            inner: Values = dict.fromkeys(function.inputs)
            inner.update(zip(function.inputs, operands, strict=False))
            _Run(self.model, function.opset, attributes).nodes(function.nodes, inner)
            return [inner[name] for name in function.outputs]
        row = self.model.operators.find(node.operator, self.opset)
        if row is None:
            raise unfit(f"an operator with a row in opset {self.opset}", node.operator)
        call = Call(node, self.opset, np, partial(self._graph, outer=known), self.training)
        return _computed(row, call, (self.model.file, node.number), operands)

    def _graph(self, graph: Graph, given: Sequence[Any], outer: Values) -> list[Any]:
        """The results of a branch or a body, in which values around it are known too."""
        if len(given) != len(graph.inputs):
            raise unfit(f"{len(graph.inputs)} inputs of graph {graph.name}", str(len(given)))
        own = dict(graph.constants)
        own.update(zip((each.name for each in graph.inputs), given, strict=True))
        known: Values = ChainMap(own, outer)
        self.nodes(graph.nodes, known)
        return [known[output.name] for output in graph.outputs]


def _computed(row: Row, call: Call, place: tuple[str, int], operands: list[Any]) -> Sequence[Any]:
    """The results of a row, computed below a frame of a place."""
    import jax
    import jax.numpy as jnp

    node = call.node
    while operands and operands[-1] is None:
        operands.pop()
    _check_count(row.function, operands)
    for n in row.static:
        if n < len(operands) and not is_known(operands[n]):
            raise of_values(f"operand {n + 1}, {node.inputs[n]!r}")
    folds = row.folds and all(map(is_known, operands)) and _size(operands) <= MOST_FOLDED
    if not folds:
        operands = [
            narrowed(value) if isinstance(value, np.ndarray) and n not in row.static else value
            for n, value in enumerate(operands)
        ]
        call = replace(call, xp=jnp)
    scope = node.name.strip("/") or node.operator
    with np.errstate(all="ignore"), jax.named_scope(scope):
        found = called_at([place], partial(row.function, call, *operands))
    results = found if isinstance(found, tuple) else (found,)
    dtype = None if row.has_own_type or not operands else operands[0].dtype
    return [_typed(result, dtype) for result in results]


def _typed(result: Any, dtype: np.dtype[Any] | None) -> Any:
    """A result in a type; what is known is an array of NumPy."""
    result = np.asarray(result) if isinstance(result, np.generic) else result
    if dtype is None or result.dtype == dtype:
        return result
    return result.astype(dtype if isinstance(result, np.ndarray) else computed_type(dtype))


def _size(operands: Sequence[Any]) -> int:
    """Elements of what is computed of operands element by element."""
    shapes = [value.shape for value in operands if value is not None]
    try:
        return math.prod(np.broadcast_shapes(*shapes))
    except ValueError:
        return max(map(math.prod, shapes))


def _check_count(function: Function, operands: Sequence[Any]) -> None:
    """Raise ImportRuleError for operands that are missing, and for too many."""
    needed, most = _counts(function)
    given = sum(value is not None for value in operands[:needed])
    if given < needed or len(operands) > most:
        least = f"{needed}" if most == needed else f"{needed} to {most}"
        wanted = least if most < MANY else f"{needed} or more"
        raise unfit(f"{wanted} operands", str(given if given < needed else len(operands)))


MANY = 1 << 30


@cache
def _counts(function: Function) -> tuple[int, int]:
    """How many operands a row needs, and takes."""
    _, *parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = sum(p.default is p.empty for p in named)
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return needed + (takes_all and not named), (MANY if takes_all else len(named))


def known_operands(model: Model) -> set[str]:
    """Names of values that rows have to know."""
    return set(_operands(model, model.graph.nodes, lambda row: row.static))


def frozen_operands(model: Model) -> set[str]:
    """Names of values that training does not change: statistics, scales, zero points."""
    return set(_operands(model, model.graph.nodes, lambda row: row.frozen))


def label_operands(model: Model) -> set[str]:
    """Names of inputs of a graph that only training has: all their uses are labels."""
    labels = set(_operands(model, model.graph.nodes, lambda row: row.labels))
    used = (
        name
        for node in model.graph.nodes
        for place, name in enumerate(node.inputs)
        if not _is_label(model, node, place)
    )
    return (labels - set(used)) & {value.name for value in model.graph.inputs}


def _is_label(model: Model, node: Node, place: int) -> bool:
    row = None if node.domain else model.find(node)
    return row is not None and place in row.labels


def _operands(
    model: Model, nodes: Sequence[Node], places: Callable[[Row], Sequence[int]]
) -> Iterator[str]:
    """Names of operands of nodes at some places of their rows, also inside of functions."""
    for node in nodes:
        function = model.functions.get((node.domain, node.operator))
        if function is not None:
            inside = set(_operands(model, function.nodes, places))
            rows = zip(function.inputs, node.inputs, strict=False)
            yield from (given for name, given in rows if name in inside)
            continue
        row = None if node.domain else model.find(node)
        chosen = places(row) if row is not None else ()
        yield from (node.inputs[place] for place in chosen if place < len(node.inputs))
        for graph in node.graphs:
            yield from _operands(model, graph.nodes, places)
