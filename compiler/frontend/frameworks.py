"""Frameworks whose models are no files that the importer reads: a row each says how one is told,
and how it becomes the content of one.

Everything else is the content of a file, whose form is found by its bytes (`detect.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.frontend.tensorflow import start as tensorflow


@dataclass(frozen=True, slots=True)
class Framework:
    """How models of a framework are told by their path, and what makes the content of one, of
    (path, sizes of open dims)."""

    is_model: Callable[[str], bool]
    content: Callable[[str, str], bytes]


def _traced(model: str, input_shape: str) -> bytes:
    from shardwright.compiler.frontend.tensorflow.asking import traced_once

    return traced_once(model, input_shape)


FRAMEWORKS: Mapping[str, Framework] = {"tensorflow": Framework(tensorflow.is_model, _traced)}
"""By the name that `--framework` has for it."""


def content_of(file: Path, framework: str, input_shape: str) -> bytes:
    """What the importer reads of a model: the bytes of its file, or what its framework makes of it.

    Raises: OSError for a file that cannot be read; DiagnosticError as the framework.
    """
    path = str(file)
    for name, row in FRAMEWORKS.items():
        if name == framework or row.is_model(path):
            return row.content(path, input_shape)
    return file.read_bytes()
