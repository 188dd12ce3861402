"""What is TensorFlow's, told without loading it: folders, files, and the imports of Python code."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

MAGIC = b"SWTF\x01\n"
"""How a traced program begins (`program.py`)."""
SAVED = ("saved_model.pb", "saved_model.pbtxt")
"""Files of which a SavedModel's folder has one."""
KERAS = ".keras"
"""How files that Keras saves end."""
_PACKAGES = frozenset(("tensorflow", "keras", "tf_keras"))
_BACKEND = "KERAS_BACKEND"


def is_program(data: bytes) -> bool:
    """Whether bytes begin as a traced program does."""
    return data.startswith(MAGIC)


def split_name(model: str) -> tuple[str, str]:
    """(path, name behind it) of `saved:serving_default` or `file.py:function`; the name is empty
    where there is none."""
    path, colon, name = model.rpartition(":")
    is_named = bool(colon) and name.isidentifier() and bool(path)
    return (path, name) if is_named else (model, "")


def is_saved(path: Path) -> bool:
    """Whether a path is a SavedModel's folder, or a file of Keras."""
    if path.suffix == KERAS:
        return path.is_file()
    return path.is_dir() and any((path / name).is_file() for name in SAVED)


def is_model(model: str) -> bool:
    """Whether words on the command line mean a model of TensorFlow: a folder, a file of Keras, or a
    function of a Python file that imports it."""
    path, name = split_name(model)
    if path.endswith(".py"):
        return bool(name) and imports_it(Path(path))
    return is_saved(Path(path)) or is_saved(Path(model))


def imports_it(path: Path) -> bool:
    """Whether a Python file, or a file beside it that it imports, imports TensorFlow, or Keras on
    it. The files are read, not run."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for name in _imported(file):
            if name.partition(".")[0] in _PACKAGES:
                return True
            waiting.append(path.parent.joinpath(*name.split(".")).with_suffix(".py"))
    return False


def _imported(file: Path) -> Iterator[str]:
    """The modules that a file imports anywhere; none where it is no Python, which is told where it
    is used, or where Keras is given another backend."""
    try:
        text = file.read_bytes()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return
    is_elsewhere = (
        _BACKEND.encode() in text or os.environ.get(_BACKEND, "tensorflow") != "tensorflow"
    )
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        yield from (name for name in names if not (is_elsewhere and name.startswith("keras")))
