"""Nodes of an ONNX graph that run on the host: by our rows where they have them, in the types of
the file; a few in NumPy; else by ONNX's own reference, where it is installed."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import LoadError, Loc, SimulationError
from shardwright.compiler.frontend.graphs.graph import Model, Node
from shardwright.compiler.frontend.graphs.interpreter import has_rows, reads, results_of
from shardwright.compiler.frontend.graphs.types import Array, on_host
from shardwright.compiler.frontend.onnx.foreseen import widened
from shardwright.compiler.frontend.onnx.model import Untaken

Own = Callable[..., Any]


class Host:
    """The nodes of a model that its host runs; calls may be at the same time."""

    def __init__(self, data: bytes, model: Model, nodes: Sequence[Node]) -> None:
        """`data` is the model's file. Raises LoadError where a node needs ONNX's reference, and
        that is not installed."""
        self._data, self._model = data, model
        self._lock = threading.Lock()
        self._evaluators: dict[int, Any] = {}
        self._by_rows = {n.number for n in nodes if has_rows(model, n) and not _untaken(model, n)}
        strange = [n for n in nodes if n.number not in self._by_rows and _own(n) is None]
        if strange and importlib.util.find_spec("onnx") is None:
            first = strange[0]
            raise LoadError(
                "SW_NEEDS_PACKAGE",
                f"the onnx package is required for {', '.join({n.operator for n in strange})},"
                " which neither has a row nor is compiled; got none",
                Loc(model.file, first.number, first.scope),
                "pip install onnx, whose reference runs such nodes on the CPU",
            )

    def constants(self) -> dict[str, Any]:
        """Initializers by name, texts among them."""
        found: dict[str, Any] = dict(self._model.graph.constants)
        if any(isinstance(value, Untaken) for value in found.values()):
            from onnx import numpy_helper

            held = {each.name: each for each in self._proto.graph.initializer}
            for name, value in found.items():
                if isinstance(value, Untaken):
                    found[name] = numpy_helper.to_array(held[name])
        return found

    def run(self, node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
        """The results of a node by name. Raises ImportRuleError, SimulationError at it."""
        names = [name for name in node.outputs if name]
        read = {name: values[name] for name in reads(node)}
        if node.number in self._by_rows and all(map(_has_numbers, read.values())):
            with on_host():
                found = results_of(self._model, node, read)
            return {name: widened(node, name, np.asarray(found[name])) for name in names}
        own = _own(node)
        if own is not None:
            operands = [values[name] if name else None for name in node.inputs]
            results = own(node.attributes, *operands)
            return {n: r for n, r in zip(node.outputs, results, strict=False) if n}
        return self._by_reference(node, names, values)

    @cached_property
    def _proto(self) -> Any:
        import onnx

        return onnx.load_model_from_string(self._data)

    def _by_reference(
        self, node: Node, names: Sequence[str], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        read = reads(node)
        try:
            with self._lock:  # of making it, and of nodes that keep a state
                evaluator = self._evaluator(node, names, read)
                found = evaluator.run(list(names), {name: values[name] for name in read})
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            raise SimulationError(
                "SW_SAVED_HOST",
                f"{node.scope}: requires operands that ONNX's reference takes, got"
                f" {type(error).__name__}: {said}",
                Loc(self._model.file, node.number, node.scope),
            ) from error
        return dict(zip(names, found, strict=True))

    def _evaluator(self, node: Node, names: Sequence[str], read: Sequence[str]) -> Any:
        if node.number not in self._evaluators:
            import onnx
            from onnx.reference import ReferenceEvaluator

            whole = self._proto
            inputs, outputs = (
                [onnx.ValueInfoProto(name=name) for name in each] for each in (read, names)
            )
            made = onnx.helper.make_graph(
                [whole.graph.node[node.number - 1]], "node", inputs, outputs
            )
            imports = [each for each in whole.opset_import if each.domain != "shardwright"]
            model = onnx.helper.make_model(
                made, opset_imports=imports, functions=list(whole.functions)
            )
            model.ir_version = whole.ir_version
            self._evaluators[node.number] = ReferenceEvaluator(model)
        return self._evaluators[node.number]


def _untaken(model: Model, node: Node) -> bool:
    """Whether a node, or one inside of it, has what is no tensor of numbers."""
    inside = [node, *(each for graph in node.graphs for each in graph.nodes)]
    texts = {name for name, v in model.graph.constants.items() if isinstance(v, Untaken)}
    texts |= {value.name for value in model.graph.inputs if value.dtype is None}
    has = any(isinstance(v, Untaken) for each in inside for v in each.attributes.values())
    return has or bool(texts & set(reads(node)))


def _has_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OUSc"


def _own(node: Node) -> Own | None:
    return None if node.domain else _NUMPY.get(node.operator)


def _non_max_suppression(
    attributes: Mapping[str, Any],
    boxes: Array,
    scores: Array,
    most: Array | None = None,
    overlap: Array | None = None,
    least: Array | None = None,
) -> tuple[Array]:
    """Boxes that overlap no better one of their class too much: rows (batch, class, box) of
    int64, the best of a class first. Source: ONNX's page of NonMaxSuppression."""
    count = int(np.ravel(most)[0]) if most is not None else 0
    limit = float(np.ravel(overlap)[0]) if overlap is not None else 0.0
    corners = _corners(boxes, bool(attributes.get("center_point_box", 0)))
    found: list[tuple[int, int, int]] = []
    for batch, kind in np.ndindex(scores.shape[0], scores.shape[1]):
        row = scores[batch, kind]
        order = np.argsort(-row, kind="stable")
        if least is not None:
            order = order[row[order] > float(np.ravel(least)[0])]
        kept: list[int] = []
        for place in order.tolist():
            if len(kept) >= count:
                break
            if all(_overlap(corners[batch, place], corners[batch, k]) <= limit for k in kept):
                kept.append(place)
        found += [(batch, kind, place) for place in kept]
    return (np.asarray(found, np.int64).reshape(-1, 3),)


def _corners(boxes: Array, is_centered: bool) -> Array:
    """Boxes as their low and high corners."""
    if is_centered:
        low, high = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
    else:
        low = np.minimum(boxes[..., :2], boxes[..., 2:])
        high = np.maximum(boxes[..., :2], boxes[..., 2:])
    return np.concatenate((low, high), -1)


def _overlap(a: Array, b: Array) -> float:
    """What two boxes share of all that they cover."""
    sides = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None)
    shared = float(sides.prod())
    whole = float((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod()) - shared
    return shared / whole if whole > 0 else 0.0


def _det(_: Mapping[str, Any], x: Array) -> tuple[Array]:
    return (np.asarray(np.linalg.det(x), x.dtype),)


def _unique(attributes: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """Elements, or slices along an axis, each once: (they, first places, places of all, counts).
    Source: ONNX's page of Unique."""
    axis = attributes.get("axis")
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not attributes.get("sorted", 1):
        order = np.argsort(first)
        rank = np.argsort(order)
        values = np.take(values, order, axis or 0)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    return (values, *(each.astype(np.int64) for each in (first, inverse, counts)))


_NUMPY: Mapping[str, Own] = {
    "NonMaxSuppression": _non_max_suppression,
    "Det": _det,
    "Unique": _unique,
}
"""Operators without a row, since their results have shapes of their values, or no engine does
them."""
