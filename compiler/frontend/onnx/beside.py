"""Which files hold the weights of an ONNX model: they lie in its folder or below."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.compiler.frontend.onnx.schema import MODEL, SCHEMA
from shardwright.compiler.frontend.onnx.tensors import EXTERNAL
from shardwright.compiler.frontend.onnx.wire import DamagedError, read


def files_beside(data: bytes, folder: Path) -> tuple[Path, ...]:
    """Files in `folder` that hold weights of a model file, each once; none of a damaged one."""
    try:
        found = read(data, MODEL, SCHEMA)
    except DamagedError:
        return ()
    return tuple(dict.fromkeys(folder / place for place in _places(found)))


def _places(message: Any) -> Iterator[str]:
    """Where tensors of a message say that their elements are, however deep."""
    if isinstance(message, list) and message and isinstance(message[0], dict):
        for part in message:
            yield from _places(part)
    elif isinstance(message, dict):
        if message.get("location") == EXTERNAL:
            entries = {entry["key"]: entry["value"] for entry in message["external"]}
            yield from filter(None, [entries.get("location")])
        for part in message.values():
            yield from _places(part)
