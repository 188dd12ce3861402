"""The table of ONNX's own operators; a row is as `graphs/table.py` says."""

from __future__ import annotations

from shardwright.compiler.frontend.graphs.table import Operators

ONNX = Operators()
"""Rows of ONNX's own operators; `operators/__init__.py` loads the files that fill it."""
