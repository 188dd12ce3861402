"""A saved ONNX model that is loaded and called: nodes with a NEFF run on the simulator, the others
on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import (
    DiagnosticError,
    LoadError,
)
from shardwright.compiler.frontend.graphs.graph import Model, Node, Value
from shardwright.compiler.frontend.locations import named_file
from shardwright.compiler.frontend.onnx.hosting import Host
from shardwright.compiler.frontend.onnx.model import read_model
from shardwright.compiler.frontend.onnx.saved_form import (
    EXECUTABLE,
    TARGET,
    TYPES,
    about_of,
    is_neff,
)
from shardwright.compiler.frontend.onnx.tensors import type_of
from shardwright.compiler.frontend.onnx.wire import DamagedError
from shardwright.orchestrator.saved.neff_node import AGAIN, NeffNode
from shardwright.orchestrator.saved.specs import Spec, checked
from shardwright.orchestrator.traced.report import PartitionReport


def spec_of(value: Value) -> Spec:
    """An input or a result of a graph."""
    shape = value.shape
    dims = None if shape is None else tuple(n if isinstance(n, int) else -1 for n in shape)
    return Spec(value.name, value.dtype, dims)


def neff_node(name: str, attributes: Mapping[str, Any], target: str = "") -> NeffNode:
    """The node of some attributes. Raises LoadError for damage, and for a machine that does not
    take its NEFF."""
    executable = attributes.get(EXECUTABLE)
    if not isinstance(executable, np.ndarray) or not attributes.get(TARGET):
        raise LoadError(
            "SW_SAVED_FILE",
            f"{name} requires attributes {EXECUTABLE}, {TARGET} and {TYPES}, got"
            f" {', '.join(attributes) or 'none'}",
            hint=AGAIN,
        )
    types = tuple(type_of(number, name) for number in attributes.get(TYPES) or ())
    return NeffNode.of(name, executable.tobytes(), types, target)


@dataclass(frozen=True)
class SavedModel:
    """A model that takes arrays by the names of its inputs, and returns its results by name. Calls
    may be at the same time."""

    model: Model
    host: Host
    nodes: Mapping[int, NeffNode]
    about: PartitionReport | None
    constants: Mapping[str, Any] = field(repr=False)

    @property
    def inputs(self) -> tuple[Spec, ...]:
        """What it takes."""
        return tuple(map(spec_of, self.model.graph.inputs))

    @property
    def outputs(self) -> tuple[Spec, ...]:
        """What it returns."""
        return tuple(map(spec_of, self.model.graph.outputs))

    def report(self) -> PartitionReport | None:
        """Its parts, and what stays on the CPU; None of a model that has none."""
        return self.about

    def __call__(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
        """Its results by name, from arrays by name. Raises UsageError for inputs that it does not
        take, SimulationError for what a part does not take."""
        values = {**self.constants, **checked(self.inputs, {**(inputs or {}), **named})}
        with named_file(self.model.file):
            for node in self.model.graph.nodes:
                values |= self._results(node, values)
        return {output.name: values[output.name] for output in self.model.graph.outputs}

    def _results(self, node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
        part = self.nodes.get(node.number)
        if part is None:
            return self.host.run(node, values)
        return dict(zip(node.outputs, part.run([values[n] for n in node.inputs]), strict=True))


def load_onnx(path: Path, target: str = "") -> SavedModel:
    """The model of a file, on a machine; "" is the one that it was saved for. Raises LoadError,
    ImportRuleError for a damaged one, and for a machine that does not take it."""
    data = path.read_bytes()
    with named_file(str(path)):
        model = read_model(data, str(path), is_tolerant=True)
        parts = [node for node in model.graph.nodes if is_neff(node)]
        nodes = {n.number: neff_node(f"{path.name}:{n.name}", n.attributes, target) for n in parts}
        host = Host(data, model, [n for n in model.graph.nodes if n.number not in nodes])
        return SavedModel(model, host, nodes, _report(data, path), host.constants())


def _report(data: bytes, path: Path) -> PartitionReport | None:
    try:
        about = about_of(data)
        return None if about is None else PartitionReport.of_dict(about["report"])
    except DiagnosticError:
        raise
    except (DamagedError, KeyError, TypeError, ValueError) as error:
        raise LoadError(
            "SW_SAVED_FILE",
            f"{path}: metadata that `shardwright save` wrote are required, got"
            f" {type(error).__name__}: {error}",
            hint=AGAIN,
        ) from error
