"""The form of ONNX models, and how one begins; importing this loads nothing."""

from __future__ import annotations

from shardwright.compiler.frontend.graphs.form import Form

START = b"\x08"
"""The key of `ir_version`, a model's first field, which every model has."""


def is_model(data: bytes) -> bool:
    """Whether a file begins as an ONNX model does."""
    return data[:1] == START


FORM = Form(
    name="ONNX",
    page="docs/onnx.md",
    check="check it: onnx.checker.check_model(path)",
    is_model=is_model,
)
"""ONNX models."""
