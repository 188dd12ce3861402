"""The class that ONNX's reference evaluator takes for nodes with a NEFF."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.compiler.frontend.onnx.saved_form import DOMAIN, OPERATOR
from shardwright.compiler.frontend.user_code import called


def neff_op(run: Callable[..., tuple[Any, ...]]) -> type[Any]:
    """The class; `run` takes (arrays, executable, target, types) of a node. Raises UsageError where
    onnx is not installed."""
    with called("importing onnx"):
        from onnx.reference.op_run import OpRun

    class Neff(OpRun):  # type: ignore[misc]
        """`shardwright::Neff`."""

        op_domain = DOMAIN

        def _run(self, *arrays: Any, executable: Any, target: str, types: Any) -> tuple[Any, ...]:
            return run(arrays, executable, target, types)

    assert Neff.__name__ == OPERATOR
    return Neff
