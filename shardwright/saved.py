"""Models of other frameworks whose supported parts are NEFF files, the rest as it was.

    import shardwright.saved
    shardwright.saved.compile("model.onnx", "saved.onnx", target="trn1")
    results = shardwright.saved.load("saved.onnx")(x=array)

What a name needs is loaded with its first use: importing this loads neither onnx nor jax.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.orchestrator.saved.onnx_model import SavedModel
    from shardwright.orchestrator.traced.report import PartitionReport

__all__ = ["analyze", "compile", "load", "reference_ops"]


def compile(
    model: Path | str,
    output: Path | str,
    *,
    target: str = "",
    input_shape: str = "",
    minimum_segment_size: int = 2,
    no_fuse_ops: Collection[str] = (),
    extract_weights: bool = False,
    beside: bool = False,
    signature: str = "",
    compiler_args: Sequence[str] | str = (),
    compiler_workdir: Path | str = "",
) -> PartitionReport:
    """Write a model with its supported parts as NEFF files; returns what became of it.

    `target` is the machine, `input_shape` the sizes of open dims (`"batch=4,x=4x3x8x8"`). Compiled
    parts have at least `minimum_segment_size` operators; `no_fuse_ops` are nodes that stay on the
    CPU, by their names or their operators'. Weights are constants of the NEFF files, or, with
    `extract_weights`, stay in the model; NEFF files are inside of the model, or in a folder
    `beside` it (of an ONNX model). `signature` is which of a SavedModel. `compiler_args` are flags
    of `shardwright compile`.

    Raises UsageError for a model of another kind, for sizes that are missing, and where nothing is
    left to compile; else the DiagnosticError of its reader or the compiler.
    """
    from shardwright.orchestrator.saved.asked import Asked
    from shardwright.orchestrator.saved.saving import save

    asked = Asked(
        target=target,
        input_shape=input_shape,
        minimum_segment_size=minimum_segment_size,
        no_fuse_ops=no_fuse_ops,
        extract_weights=extract_weights,
        beside=beside,
        signature=signature,
        compiler_args=compiler_args,
        compiler_workdir=compiler_workdir,
    )
    return save(Path(model), Path(output), asked)


def analyze(
    model: Path | str,
    *,
    target: str = "",
    input_shape: str = "",
    minimum_segment_size: int = 2,
    no_fuse_ops: Collection[str] = (),
    signature: str = "",
    compiler_args: Sequence[str] | str = (),
) -> PartitionReport:
    """Which operators of a model `compile` would compile, which would stay on the CPU, and why;
    arguments are those of it. Raises as it does, but where nothing is compiled."""
    from shardwright.orchestrator.saved.asked import Asked
    from shardwright.orchestrator.saved.saving import analyze as analyzed

    asked = Asked(
        target=target,
        input_shape=input_shape,
        minimum_segment_size=minimum_segment_size,
        no_fuse_ops=no_fuse_ops,
        signature=signature,
        compiler_args=compiler_args,
    )
    return analyzed(Path(model), asked)


def load(path: Path | str, *, target: str = "") -> SavedModel:
    """A model that `compile` wrote, or any ONNX model: a callable of arrays by the names of its
    inputs. `target` is the machine that runs it, if not the one it was saved for. Raises LoadError,
    ImportRuleError for a damaged file, and for a machine that does not take it."""
    from shardwright.orchestrator.saved.saving import load as load_saved

    found: SavedModel = load_saved(Path(path), target)
    return found


def reference_ops() -> list[Any]:
    """Operators for `onnx.reference.ReferenceEvaluator(model, new_ops=...)`, with which that runs a
    saved model. Raises UsageError where onnx is not installed."""
    from shardwright.orchestrator.saved.reference import reference_ops as made

    return made()
