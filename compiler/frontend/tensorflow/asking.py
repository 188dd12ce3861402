"""Programs of TensorFlow for this process, which never loads it: a child traces them.

A child stays for what is asked next, as long as whoever asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.compiler.diagnostics import DiagnosticError, Loc, UsageError
from shardwright.compiler.frontend.isolated import TIMEOUT_S, Isolated
from shardwright.compiler.frontend.tensorflow.start import is_saved, split_name

_CHILD = "shardwright.compiler.frontend.tensorflow.child"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is traced: the function of a path (`start.split_name`), with sizes of open dims, of so
    many samples (0: as many as it says itself). `training` takes the model as it is trained;
    `loss` is one by name that gradients are of. With `values` of its variables, and of the example,
    where those are asked for. Files below the folder `base` are named from there."""

    model: str
    sizes: str = ""
    samples: int = 0
    training: bool = False
    loss: str = ""
    values: bool = False
    base: str = ""


class Tracer:
    """A child that traces. It ends with this object, or with the process."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._child = Isolated(_CHILD, "TensorFlow", "model", timeout_s)
        self._end = weakref.finalize(self, self._child.stop)

    def stop(self) -> None:
        """End the child now."""
        self._end()

    def traced(self, asked: Asked) -> bytes:
        """A traced program (`program.py`).

        Raises: UsageError for a path that leads to nothing, what the user's code raises, and
        TensorFlow that is not installed; ImportRuleError for what XLA does not take, and a child
        that does not answer.
        """
        path, _ = split_name(asked.model)
        check_path(asked.model)
        with _hinted(Path(path).name):
            program: bytes = self._child.ask(asdict(asked), path)["program"]
        return program


def check_path(model: str) -> None:
    """That a path leads to something of TensorFlow's. Raises UsageError."""
    path, name = split_name(model)
    file = Path(path)
    is_python = file.suffix == ".py"
    try:
        is_there = file.exists() or Path(model).exists()
        is_it = (is_python and bool(name)) or is_saved(file) or is_saved(Path(model))
    except OSError as error:  # links in a circle
        raise UsageError("SW_MODEL", f"cannot read {path}: {error.strerror}") from error
    if is_it and is_there:
        return
    if not is_there:
        raise UsageError("SW_MODEL", f"cannot read {path}: {_why(file)}")
    given = "a Python file without a function" if is_python else _shown(file)
    raise UsageError(
        "SW_TF_MODEL",
        f"a model of TensorFlow requires a SavedModel's folder, a .keras file or FILE.py:FUNCTION,"
        f" got {given}",
        Loc(path),
        "tf.saved_model.save(model, 'folder') makes one; HLO, ONNX and others are found by their"
        " content: leave --framework out",
    )


def _why(path: Path) -> str:
    """Why a path is not there."""
    try:
        path.stat()
    except OSError as error:
        return error.strerror or str(error)
    return "it is of another kind"


def _shown(path: Path) -> str:
    if not path.is_dir():
        return f"a file of {path.stat().st_size} bytes"
    names = sorted(p.name for p in path.iterdir())[:4]
    return f"a folder with {', '.join(names) or 'nothing in it'}, without saved_model.pb"


@contextmanager
def _hinted(name: str) -> Iterator[None]:
    """Say the file in errors that have no place."""
    try:
        yield
    except DiagnosticError as error:
        d = error.diagnostic
        if (d.loc is not None and d.loc.file) or d.code in ("SW_NEEDS_PACKAGE", "SW_INTERNAL"):
            raise
        raise type(error)(d.code, d.message, Loc(name), d.hint) from error


def traced_once(model: str, input_shape: str) -> bytes:
    """The program of a path for `compile`. Raises as `Tracer.traced`."""
    tracer = Tracer()
    try:
        return tracer.traced(Asked(model=model, sizes=input_shape))
    finally:
        tracer.stop()
