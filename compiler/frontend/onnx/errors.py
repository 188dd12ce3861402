"""What is refused of the bytes of an ONNX file."""

from __future__ import annotations

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.graphs import errors
from shardwright.compiler.frontend.onnx.start import FORM


def damaged(given: str) -> ImportRuleError:
    """The error of a file that is not read."""
    return errors.damaged(given, FORM)
