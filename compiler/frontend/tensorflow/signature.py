"""A signature of a SavedModel that is called with arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import LoadError, SimulationError
from shardwright.compiler.frontend.tensorflow.splitting import SIGNATURE, TYPES, load

_OWN = re.compile(r"error\[(\w+)\]: (.+)")
Row = tuple[str, np.dtype[Any] | None, tuple[int, ...] | None]
"""(name, type, None of what is no tensor of numbers, shape with -1 for open dims, None of an open
one)."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A function of arrays by name."""

    model: Any
    function: Any
    inputs: tuple[Row, ...]
    outputs: tuple[Row, ...]

    def run(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Its results. Raises SimulationError for what TensorFlow, or a part, does not take."""
        import tensorflow as tf

        try:
            found = self.function(**{name: tf.constant(each) for name, each in arrays.items()})
        except (tf.errors.OpError, ValueError, TypeError) as error:
            if own := _OWN.search(str(error)):  # what a part raised comes through TensorFlow
                raise SimulationError(own[1], own[2]) from error
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise SimulationError(
                "SW_SAVED_HOST",
                f"the model requires operands that TensorFlow takes, got {said[0]}",
            ) from error
        return {name: tensor.numpy() for name, tensor in found.items()}


def open_signature(path: Path) -> Signature:
    """The usual signature of a model, or its first. Raises LoadError."""
    model = load(path)
    signatures = dict(model.signatures)
    name = SIGNATURE if SIGNATURE in signatures else next(iter(signatures), "")
    if not name:
        raise LoadError("SW_SAVED_FILE", f"{path} requires a signature, got none")
    function = signatures[name]
    given = function.structured_input_signature[1]
    inputs = tuple(_row(key, given[key]) for key in given)
    results = function.structured_outputs
    return Signature(model, function, inputs, tuple(_row(key, results[key]) for key in results))


def _row(name: str, spec: Any) -> Row:
    dtype = np.dtype(spec.dtype.as_numpy_dtype) if spec.dtype.name in TYPES else None
    if spec.shape.rank is None:
        return name, dtype, None
    return name, dtype, tuple(-1 if n is None else n for n in spec.shape.as_list())
