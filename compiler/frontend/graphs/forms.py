"""Forms of model files that hold a graph of operators, and what reads them: one row each.

A form is found by content. What a row's functions need is loaded when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.compiler.frontend.graphs.form import Form
from shardwright.compiler.frontend.mxnet.start import FORM as MXNET
from shardwright.compiler.frontend.onnx.start import FORM as ONNX

if TYPE_CHECKING:
    from shardwright.compiler.frontend.graphs.graph import Model
    from shardwright.compiler.frontend.graphs.table import Operators


@dataclass(frozen=True, slots=True)
class Reading:
    """A form: `read` makes a model of a file, its content and path, `beside` names the files that
    hold its weights, `operators` is its table."""

    form: Form
    read: Callable[[bytes, str], Model]
    beside: Callable[[bytes, Path], Sequence[Path]]
    operators: Callable[[], Operators]


def _read_onnx(data: bytes, file: str) -> Model:
    from shardwright.compiler.frontend.onnx.model import read_model

    return read_model(data, file)


def _beside_onnx(data: bytes, path: Path) -> Sequence[Path]:
    from shardwright.compiler.frontend.onnx.beside import files_beside

    return files_beside(data, path.parent)


def _onnx() -> Operators:
    from shardwright.compiler.frontend.onnx.operators import ONNX

    return ONNX


def _read_mxnet(data: bytes, file: str) -> Model:
    from shardwright.compiler.frontend.mxnet.symbol import read_model

    return read_model(data, file)


def _beside_mxnet(data: bytes, path: Path) -> Sequence[Path]:
    from shardwright.compiler.frontend.mxnet.parameters import file_beside

    found = file_beside(path)
    return () if found is None else (found,)


def _mxnet() -> Operators:
    from shardwright.compiler.frontend.mxnet.operators import MXNET

    return MXNET


FORMS: Sequence[Reading] = (
    Reading(ONNX, _read_onnx, _beside_onnx, _onnx),
    Reading(MXNET, _read_mxnet, _beside_mxnet, _mxnet),
)
"""Every form."""
NAMES = tuple(row.form.name for row in FORMS)


def form_of(data: bytes) -> Reading | None:
    """The form of a file's content; None for a file without a graph of operators."""
    return next((row for row in FORMS if row.form.is_model(data)), None)
