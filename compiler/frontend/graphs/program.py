"""A model of operators as a function of its weights and inputs, and as StableHLO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.frontend.capture import Lowered, function_artifact
from shardwright.compiler.frontend.graphs.errors import untyped
from shardwright.compiler.frontend.graphs.forms import NAMES, form_of
from shardwright.compiler.frontend.graphs.graph import Model, Value
from shardwright.compiler.frontend.graphs.interpreter import (
    check_operators,
    evaluate,
    frozen_operands,
    known_operands,
    label_operands,
)
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.graphs.table import Training
from shardwright.compiler.frontend.graphs.types import Array, computed_type, narrowed
from shardwright.compiler.frontend.locations import MODULE_FILE, named_file


@dataclass(frozen=True)
class Program:
    """A model that can be computed."""

    model: Model

    @classmethod
    def read(cls, data: bytes, file: str = MODULE_FILE) -> Program:
        """That of a file, whose form is found by its content; files of its weights lie beside it.
        Raises ImportRuleError as the reader of the form, and for operators without a row."""
        form = form_of(data)
        if form is None:
            raise ImportRuleError(
                "SW_MODEL_FORM",
                f"a model of {' or '.join(NAMES)} is required, got"
                f" {len(data)} bytes that begin with {data[:16]!r}",
                Loc(file),
            )
        with named_file(file):
            model = form.read(data, file)
            check_operators(model)
        return cls(model)

    @cached_property
    def weights(self) -> dict[str, Array]:
        """Initializers that are arguments of a program, by name: numbers of a weight's type, with
        a dim that no row has to know."""
        known = known_operands(self.model)
        return {
            name: narrowed(array)
            for name, array in self.model.graph.constants.items()
            if name not in known and array.ndim and is_weight(array)
        }

    @cached_property
    def trained(self) -> set[str]:
        """Weights that training changes."""
        frozen = frozen_operands(self.model)
        return {n for n, w in self.weights.items() if w.dtype.kind not in "iu" and n not in frozen}

    @property
    def results(self) -> list[str]:
        """Names of its results."""
        return [output.name for output in self.model.graph.outputs]

    @cached_property
    def labels(self) -> set[str]:
        """Names of inputs that only training has."""
        return label_operands(self.model)

    @cached_property
    def given(self) -> list[Value]:
        """Inputs that every step has."""
        return [value for value in self.model.graph.inputs if value.name not in self.labels]

    @cached_property
    def has_loss(self) -> bool:
        """Whether a node says what the graph is trained for."""
        rows = (self.model.find(node) for node in self.model.graph.nodes if not node.domain)
        return any(row is not None and row.is_loss for row in rows)

    def inputs(self, sizes: Sizes) -> dict[str, Any]:
        """Inputs without values. Raises UsageError, ImportRuleError for dims without a size."""
        import jax

        found = {}
        with named_file(self.model.file):
            shapes = sizes.shapes(self.given)
            for value in self.given:
                if value.dtype is None:
                    raise untyped(f"input {value.name}", "a value without a type")
                dtype = computed_type(value.dtype)
                found[value.name] = jax.ShapeDtypeStruct(shapes[value.name], dtype)
        return found

    def __call__(
        self,
        weights: Mapping[str, Any],
        inputs: Mapping[str, Any],
        training: Training | None = None,
    ) -> dict[str, Any]:
        """Its results by name, of labels that are given or not."""
        import jax.numpy as jnp

        given = {name: jnp.asarray(value) for name, value in {**weights, **inputs}.items()}
        results = evaluate(self.model, {**dict.fromkeys(self.labels), **given}, training)
        return {
            name: jnp.asarray(narrowed(value) if isinstance(value, np.ndarray) else value)
            for name, value in zip(self.results, results, strict=True)
        }


def is_weight(array: Array) -> bool:
    """Whether an array may be a weight: larger whole numbers are shapes and indices."""
    return array.dtype.kind not in "biu" or (array.dtype.kind in "iu" and array.itemsize == 1)


def lowered_file(data: bytes, file: str, input_shape: str) -> Lowered:
    """The model of a file, its content, as a program of (weights, inputs).

    Raises: ImportRuleError as `Program`; UsageError for sizes that do not fit.
    """
    program = Program.read(data, file)
    inputs, weights = program.inputs(Sizes.of(input_shape)), _shapes(program.weights)

    def call(given: Any, values: Any) -> list[Any]:
        by_name = dict(zip(weights, given, strict=True)), dict(zip(inputs, values, strict=True))
        found = program(*by_name)
        return [found[name] for name in program.results]

    artifact = function_artifact(call, list(weights.values()), list(inputs.values()))
    return Lowered(artifact, (*weights, *inputs), tuple(program.results))


def _shapes(arrays: Mapping[str, Array]) -> dict[str, Any]:
    import jax

    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
