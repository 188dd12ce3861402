"""Which kind a model is that is saved or loaded, found by its content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import LoadError, UsageError
from shardwright.compiler.frontend.onnx.start import is_model
from shardwright.orchestrator.saved.asked import Asked
from shardwright.orchestrator.traced.report import PartitionReport

_SAVED = ("saved_model.pb", "saved_model.pbtxt")
"""Files of which a SavedModel's folder has one."""


def save(path: Path, output: Path, asked: Asked) -> PartitionReport:
    """Write a model with its supported parts as NEFF files. Raises UsageError for a file of another
    kind, and where no part compiles; else as the reader of its kind, and the compiler."""
    kind = _kind(path, UsageError)
    if path.resolve() == output.resolve() and not asked.analyze:
        raise UsageError(
            "SW_USAGE", f"--output requires another place than that of the model, got {output}"
        )
    if kind == "onnx":
        from shardwright.orchestrator.saved.onnx_parts import save_onnx

        return save_onnx(path, output, asked)
    if kind == "tensorflow":
        from shardwright.orchestrator.saved.tensorflow_parts import save_tensorflow

        return save_tensorflow(path, output, asked)
    raise _unknown(path, UsageError)


def analyze(path: Path, asked: Asked) -> PartitionReport:
    """What would become of a model: which operators would be compiled, and why others would not.
    Raises as `save`, but where nothing is compiled."""
    return save(path, path, replace(asked, analyze=True))


def load(path: Path, target: str = "") -> Any:
    """A saved model, on a machine; "" is the one that it was saved for. Raises LoadError."""
    kind = _kind(path, LoadError)
    if kind == "onnx":
        from shardwright.orchestrator.saved.onnx_model import load_onnx

        return load_onnx(path, target)
    if kind == "tensorflow":
        from shardwright.orchestrator.saved.tensorflow_model import load_tensorflow

        return load_tensorflow(path, target)
    raise _unknown(path, LoadError)


def _kind(path: Path, error: type[UsageError] | type[LoadError]) -> str:
    try:
        if path.is_file():
            with path.open("rb") as file:
                return "onnx" if is_model(file.read(16)) else ""
        path.stat()
        if any((path / name).is_file() for name in _SAVED):
            return "tensorflow"
    except OSError as refused:
        raise error("SW_SAVED_FILE", f"cannot read {path}: {refused.strerror}") from refused
    return ""


def _unknown(path: Path, error: type[UsageError] | type[LoadError]) -> UsageError | LoadError:
    return error(
        "SW_SAVED_FILE",
        f"{path}: an ONNX model, or the folder of a SavedModel, is required, got neither",
        hint="export the model with torch.onnx.export or tf2onnx, and give that file",
    )
