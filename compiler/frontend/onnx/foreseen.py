"""What is known of the values of a graph before it runs: their elements, or type and shape, or why
neither is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.graphs.graph import Model, Node, Value, every_node
from shardwright.compiler.frontend.graphs.interpreter import (
    has_rows,
    known_operands,
    reads,
    results_of,
)
from shardwright.compiler.frontend.graphs.program import is_weight
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.graphs.types import Array, on_host
from shardwright.compiler.frontend.onnx.model import Untaken

INDICES = {"ArgMax": 0, "ArgMin": 0, "NonZero": 0, "TopK": 1, "Unique": 1}
"""Operators with results of int64 from the place on that JAX counts in int32 (ONNX's pages)."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """A value of which type and shape are known."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size, in the type of the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Open:
    """A value of which the shape or the type is not known, and why."""

    reason: str


Seen = Array | Shaped | Open


@dataclass(frozen=True)
class Foreseen:
    """All values of a graph by name, and why nodes are not compiled, by number. Values whose
    elements are known are arrays, in the types of the file."""

    values: Mapping[str, Seen]
    weights: Mapping[str, Array]
    reasons: Mapping[int, str]

    def is_known(self, name: str) -> bool:
        """Whether the elements of a value are known, those of weights not counted."""
        return isinstance(self.values[name], np.ndarray)


def foreseen(model: Model, sizes: Sizes) -> Foreseen:
    """What is known of a model's values. Raises UsageError, ImportRuleError for sizes of its inputs
    that are missing or do not fit."""
    graph = model.graph
    numbers = tuple(value for value in graph.inputs if value.dtype is not None)
    shapes = sizes.shapes(numbers)
    known = known_operands(model)
    weights, values = dict[str, Array](), dict[str, Seen]()
    for value in graph.inputs:
        dtype = value.dtype
        values[value.name] = (
            Open(f"input {value.name} is no tensor of numbers")
            if dtype is None
            else Shaped(dtype, shapes[value.name])
        )
    for name, constant in graph.constants.items():
        if isinstance(constant, Untaken):
            values[name] = Open(constant.reason)
        elif name not in known and constant.ndim and is_weight(constant):
            weights[name] = constant
            values[name] = Shaped(constant.dtype, constant.shape)
        else:
            values[name] = constant
    reasons = {}
    told = {**graph.declared, **{value.name: value for value in graph.outputs}}
    with on_host():
        for node in graph.nodes:
            found = _results(model, node, values)
            if isinstance(found, str):
                reasons[node.number] = found
                found = {n: _declared(told.get(n), sizes, found) for n in node.outputs if n}
            values |= found
    return Foreseen(values, weights, reasons)


def _declared(value: Value | None, sizes: Sizes, why: str) -> Seen:
    """What a file says of a value."""
    if value is None or value.dtype is None or value.shape is None:
        return Open(why)
    dims = [size if isinstance(size, int) else sizes.given.get(size) for size in value.shape]
    found = [dim[0] if isinstance(dim, tuple) else dim for dim in dims]
    if None in found:
        return Open(why)
    return Shaped(value.dtype, tuple(dim for dim in found if dim is not None))


def _results(model: Model, node: Node, values: Mapping[str, Seen]) -> dict[str, Seen] | str:
    """What is known of the results of a node, or why it is not compiled."""
    if not has_rows(model, node):
        title = f"{node.domain}." if node.domain else ""
        return f"no row for {title}{node.operator} in opset {model.opset}"
    for each in every_node(replace(model, graph=replace(model.graph, nodes=(node,)))):
        for value in each.attributes.values():
            if isinstance(value, Untaken):
                return value.reason
    names = reads(node)
    for name in names:
        if isinstance(values[name], Open):
            return f"the shape of {name} is not known before it runs"
    try:
        return _traced(model, node, {name: values[name] for name in names})
    except DiagnosticError as error:
        return f"{error.diagnostic.message} [{error.code}]"


def _traced(model: Model, node: Node, given: Mapping[str, Any]) -> dict[str, Seen]:
    """What is known of the results of a node from what is known of what it reads."""
    import jax

    arrays = {n: v for n, v in given.items() if isinstance(v, np.ndarray)}
    shapes = {
        n: jax.ShapeDtypeStruct(v.shape, v.dtype)
        for n, v in given.items()
        if not isinstance(v, np.ndarray)
    }
    known: dict[str, Seen] = {}

    def results(inputs: Mapping[str, Any]) -> dict[str, Any]:
        found = results_of(model, node, {**arrays, **inputs})
        known.update((n, v) for n, v in found.items() if isinstance(v, np.ndarray))
        return {n: v for n, v in found.items() if not isinstance(v, np.ndarray)}

    found = jax.eval_shape(results, shapes)
    shaped = {n: Shaped(np.dtype(v.dtype), tuple(v.shape)) for n, v in found.items()}
    return {n: widened(node, n, seen) for n, seen in {**known, **shaped}.items()}


def widened(node: Node, name: str, seen: Any) -> Any:
    """A result in the type that ONNX's page of its operator says."""
    place = INDICES.get(node.operator) if not node.domain else None
    if place is None or node.outputs.index(name) < place or seen.dtype != np.int32:
        return seen
    if isinstance(seen, np.ndarray):
        return seen.astype(np.int64)
    return replace(seen, dtype=np.dtype(np.int64))
