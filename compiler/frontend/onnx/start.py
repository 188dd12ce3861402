"""How an ONNX model begins; importing this loads nothing."""

from __future__ import annotations

START = b"\x08"
"""The key of `ir_version`, a model's first field, which every model has."""


def is_model(data: bytes) -> bool:
    """Whether a file begins as an ONNX model does."""
    return data[:1] == START
