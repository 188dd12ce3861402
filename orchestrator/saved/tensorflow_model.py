"""A saved SavedModel that is called: TensorFlow runs its operators, the simulator those that hold a
NEFF."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.frontend.tensorflow.saved_form import (
    NeffOp,
    about_of,
    damaged,
    neff_ops,
    register,
)
from shardwright.compiler.frontend.tensorflow.signature import Signature, open_signature
from shardwright.orchestrator.saved.neff_node import NeffNode
from shardwright.orchestrator.saved.specs import Spec, checked
from shardwright.orchestrator.traced.report import PartitionReport


class _Nodes:
    """Operators that were loaded, by digest of their NEFF and what they are called as."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[bytes, bytes], NeffNode] = {}

    def run(self, executable: Any, about: Any, *arrays: Any) -> list[np.ndarray]:
        """What TensorFlow calls."""
        op = NeffOp.of(_bytes(executable), _bytes(about))
        return self.of(op).run([np.asarray(array) for array in arrays])

    def of(self, op: NeffOp, target: str = "") -> NeffNode:
        """An operator, loaded. Raises LoadError for damage, and for a machine that does not take
        its NEFF."""
        types = tuple(np.dtype(_numpy(name)) for name in op.types)
        if target:  # another machine than its own is only asked whether it takes it
            return NeffNode.of(op.name, op.executable, types, target)
        key = hashlib.sha256(op.executable).digest(), op.about
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = NeffNode.of(op.name, op.executable, types)
            return self._loaded[key]


def _numpy(name: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, name, name)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(np.asarray(value).item())


_NODES = _Nodes()


def start() -> None:
    """Give TensorFlow what its operators with a NEFF call. Raises UsageError without TensorFlow."""
    register(_NODES.run)


@dataclass(frozen=True)
class SavedTensorFlow:
    """A model that takes arrays by the names of its inputs, and returns its results by name. Calls
    may be at the same time."""

    signature: Signature
    about: PartitionReport | None = field(repr=False)

    @property
    def inputs(self) -> tuple[Spec, ...]:
        """What it takes."""
        return tuple(Spec(*row) for row in self.signature.inputs)

    @property
    def outputs(self) -> tuple[Spec, ...]:
        """What it returns."""
        return tuple(Spec(*row) for row in self.signature.outputs)

    def report(self) -> PartitionReport | None:
        """Its parts, and what stays on the CPU; None of a model that has none."""
        return self.about

    def __call__(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
        """Its results by name, from arrays by name. Raises UsageError for inputs that it does not
        take, SimulationError for what TensorFlow or a part does not take."""
        return self.signature.run(checked(self.inputs, {**(inputs or {}), **named}))


def load_tensorflow(path: Path, target: str = "") -> SavedTensorFlow:
    """The model of a folder, on a machine; "" is the one that it was saved for. Raises UsageError
    without TensorFlow, LoadError for a damaged one, and for a machine that does not take it."""
    start()
    for op in neff_ops(path):
        _NODES.of(op, target)
    about = about_of(path)
    try:
        report = None if about is None else PartitionReport.of_dict(about["report"])
    except (KeyError, TypeError) as error:
        raise damaged(path, error) from error
    return SavedTensorFlow(open_signature(path), report)
