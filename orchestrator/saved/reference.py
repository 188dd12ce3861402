"""A node with a NEFF as an operator of ONNX's own reference evaluator."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.compiler.frontend.onnx.reference_op import neff_op
from shardwright.compiler.frontend.onnx.saved_form import EXECUTABLE, TARGET, TYPES
from shardwright.orchestrator.saved.neff_node import NeffNode
from shardwright.orchestrator.saved.onnx_model import neff_node


class _Nodes:
    """Nodes that were loaded, by their NEFF: each call of an operator has its attributes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[bytes, tuple[int, ...]], NeffNode] = {}

    def run(
        self, arrays: Sequence[Any], executable: Any, target: str, types: Sequence[int]
    ) -> tuple[Any, ...]:
        """The results of a node."""
        key = np.asarray(executable).tobytes(), tuple(int(number) for number in types)
        with self._lock:
            node = self._loaded.get(key)
            if node is None:
                said = {EXECUTABLE: np.asarray(executable), TARGET: target, TYPES: key[1]}
                node = self._loaded[key] = neff_node("shardwright.Neff", said)
        return tuple(node.run([np.asarray(array) for array in arrays]))


def reference_ops() -> list[Any]:
    """The operators, to be given as `new_ops`. Raises UsageError without onnx."""
    return [neff_op(_Nodes().run)]
