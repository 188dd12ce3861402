"""A saved ONNX model that is loaded and called: nodes with a NEFF run on the simulator, the others
on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import (
    DiagnosticError,
    LoadError,
    SimulationError,
    UsageError,
    did_you_mean,
)
from shardwright.compiler.frontend.locations import named_file
from shardwright.compiler.frontend.onnx.hosting import Host
from shardwright.compiler.frontend.onnx.model import Model, Node, Value, read_model
from shardwright.compiler.frontend.onnx.saved_form import (
    EXECUTABLE,
    TARGET,
    TYPES,
    about_of,
    is_neff,
)
from shardwright.compiler.frontend.onnx.tensors import type_of
from shardwright.compiler.frontend.onnx.wire import DamagedError
from shardwright.orchestrator.neff.loaded import LoadedNeff
from shardwright.orchestrator.traced.report import PartitionReport

_AGAIN = "save the model again: shardwright save"
_I32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class NeffNode:
    """A node that holds a NEFF: arrays in, arrays of the types that the model says out."""

    name: str
    neff: LoadedNeff
    types: tuple[np.dtype[Any], ...]

    @classmethod
    def of(cls, name: str, attributes: Mapping[str, Any], target: str = "") -> NeffNode:
        """That of a node's attributes. Raises LoadError for damage, and for a machine that does not
        take the NEFF."""
        executable, types = attributes.get(EXECUTABLE), attributes.get(TYPES)
        if not isinstance(executable, np.ndarray) or not attributes.get(TARGET):
            raise LoadError(
                "SW_SAVED_FILE",
                f"{name} requires attributes {EXECUTABLE}, {TARGET} and {TYPES}, got"
                f" {', '.join(attributes) or 'none'}",
                hint=_AGAIN,
            )
        neff = LoadedNeff.of(executable.tobytes(), name, target)
        kinds = tuple(type_of(number, name) for number in types or ())
        if len(kinds) != len(neff.outputs):
            raise LoadError(
                "SW_SAVED_FILE",
                f"{name} requires a type of each of {len(neff.outputs)} results, got {len(kinds)}",
                hint=_AGAIN,
            )
        return cls(name, neff, kinds)

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Its results in order. Raises SimulationError for operands that its NEFF does not take."""
        if len(arrays) != len(self.neff.inputs):
            raise _unfit(f"{self.name} requires {len(self.neff.inputs)} operands", len(arrays))
        for (name, _, shape), array in zip(self.neff.inputs, arrays, strict=True):
            if array.shape != shape:
                said = f"{self.name} requires {name} of shape {list(shape)}"
                raise _unfit(said, list(array.shape))
            if array.dtype in (np.int64, np.uint64) and array.size:
                low, high = int(array.min()), int(array.max())
                if low < _I32.min or high > _I32.max:
                    wrong = low if low < _I32.min else high
                    raise _unfit(f"{self.name} requires {name} of integers of 32 bits", wrong)
        found = self.neff.run(arrays)
        return [array.astype(kind) for array, kind in zip(found, self.types, strict=True)]


def _unfit(required: str, given: object) -> SimulationError:
    return SimulationError(
        "SW_SAVED_INPUT",
        f"{required}, got {given}",
        hint="a NEFF has the shapes that it was compiled for: save the model again for others,"
        " --input-shape",
    )


@dataclass(frozen=True, slots=True)
class Spec:
    """An input or a result: its type, None where it is no tensor of numbers, and its shape, in
    which a dim that depends on values is -1; None where nothing is known."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None

    @classmethod
    def of(cls, value: Value) -> Spec:
        """That of a value of a graph."""
        shape = value.shape
        dims = None if shape is None else tuple(n if isinstance(n, int) else -1 for n in shape)
        return cls(value.name, value.dtype, dims)


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
        return tuple(map(Spec.of, self.model.graph.inputs))

    @property
    def outputs(self) -> tuple[Spec, ...]:
        """What it returns."""
        return tuple(map(Spec.of, self.model.graph.outputs))

    def report(self) -> PartitionReport | None:
        """Its parts, and what stays on the CPU; None of a model that has none."""
        return self.about

    def __call__(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
        """Its results by name, from arrays by name. Raises UsageError for inputs that it does not
        take, SimulationError for what a part does not take."""
        values = {**self.constants, **self._given({**(inputs or {}), **named})}
        with named_file(self.model.file):
            for node in self.model.graph.nodes:
                values |= self._results(node, values)
        return {output.name: values[output.name] for output in self.model.graph.outputs}

    def _results(self, node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
        part = self.nodes.get(node.number)
        if part is None:
            return self.host.run(node, values)
        return dict(zip(node.outputs, part.run([values[n] for n in node.inputs]), strict=True))

    def _given(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, checked."""
        specs = {spec.name: spec for spec in self.inputs}
        for name in (*given, *specs):
            if (name in given) != (name in specs):
                got = ", ".join(given) or "none"
                raise _refused(f"inputs {', '.join(specs)}", got, did_you_mean(name, specs))
        return {name: _array(spec, given[name]) for name, spec in specs.items()}


def _array(spec: Spec, value: Any) -> Any:
    """An input as an array of its type and shape. Raises UsageError."""
    array = np.asarray(value)
    if spec.dtype is None:
        return array
    if not hasattr(value, "dtype") and np.can_cast(array.dtype, spec.dtype, "same_kind"):
        array = array.astype(spec.dtype)
    if array.dtype != spec.dtype:
        raise _refused(f"{spec.name} of {spec.dtype}", str(array.dtype))
    wanted = spec.shape
    if wanted is not None and (
        len(wanted) != array.ndim
        or any(m not in (-1, n) for m, n in zip(wanted, array.shape, strict=True))
    ):
        raise _refused(f"{spec.name} of shape {list(wanted)}", str(list(array.shape)))
    return array


def _refused(required: str, given: str, hint: str = "") -> UsageError:
    again = "a NEFF has the shapes that it was compiled for: save the model again for others"
    return UsageError("SW_SAVED_INPUT", f"{required} required, got {given}", hint=hint or again)


def load_onnx(path: Path, target: str = "") -> SavedModel:
    """The model of a file, on a machine; "" is the one that it was saved for. Raises LoadError,
    ImportRuleError for a damaged one, and for a machine that does not take it."""
    data = path.read_bytes()
    with named_file(str(path)):
        model = read_model(data, str(path), is_tolerant=True)
        parts = [node for node in model.graph.nodes if is_neff(node)]
        nodes = {
            n.number: NeffNode.of(f"{path.name}:{n.name}", n.attributes, target) for n in parts
        }
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
            hint=_AGAIN,
        ) from error
