"""`shardwright triton`: a NEFF, a traced module or a saved ONNX model as a model of a Triton model
repository."""

from __future__ import annotations

import io
import shutil
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.frontend.onnx.start import is_model
from shardwright.compiler.neff.arrays import write_arrays
from shardwright.compiler.neff.bundle import read_program
from shardwright.orchestrator.neff.neff_files import program_container
from shardwright.orchestrator.neff.neff_tools import inputs_of
from shardwright.orchestrator.terminal.outputs import prepare, write, writing
from shardwright.orchestrator.terminal.terminal import say
from shardwright.orchestrator.triton.asked import Asked, required
from shardwright.orchestrator.triton.interface import Limits, config_text
from shardwright.orchestrator.triton.served import NEFF, SAVED, TRACED, WEIGHTS, open_served

CONFIG, MODEL = "config.pbtxt", "model.py"
_MODEL_PY = '''\
"""A model of Triton's Python backend, written by `shardwright triton`."""

from pathlib import Path

import triton_python_backend_utils as pb_utils

try:
    from shardwright.orchestrator.triton.backend import ServedModel
except ImportError as error:
    raise pb_utils.TritonModelException(
        f"Shardwright is required in the environment of Triton's Python backend, got: {error}"
    )


class TritonPythonModel(ServedModel):
    """What lies beside this file, wherever that is."""

    folder = Path(__file__).parent
    utils = pb_utils
'''


def write_model(path: Path, repository: Path, asked: Asked) -> int:
    """Write the model, whole or not at all. Raises LoadError for a damaged file, UsageError for one
    that cannot be served so."""
    limits = Limits(request_timeout_s=asked.timeout_s, level=asked.level)
    model = prepare(repository / asked.name, "DIR")
    try:
        text = _write_version(path, model, asked, limits)
    except BaseException:
        with suppress(OSError):  # it has other versions
            model.rmdir()
        raise
    write(model / CONFIG, text, "DIR")
    shown = "instance" if asked.instances == 1 else "instances"
    say(f"{model}: version {asked.version}, {path.name} in {asked.instances} {shown}")
    return 0


def _write_version(path: Path, model: Path, asked: Asked, limits: Limits) -> str:
    """Write the version folder; returns `config.pbtxt`."""
    with writing(model, "DIR"), tempfile.TemporaryDirectory(prefix=".", dir=model) as made:
        folder = Path(made) / str(asked.version)
        folder.mkdir()
        (folder / MODEL).write_text(_MODEL_PY)
        _copy(path, folder, asked)
        interface = open_served(folder, asked.level).interface
        interface.check_batch(asked.max_batch)
        text = config_text(
            asked.name,
            interface,
            limits,
            max_batch=asked.max_batch,
            instances=asked.instances,
            queue=asked.queue,
            queue_timeout_s=asked.queue_timeout_s,
        )
        _check_others(model, asked.version, text)
        place = model / str(asked.version)
        if place.exists():
            place.rename(Path(made) / "old")
        folder.rename(place)
    return text


def _copy(path: Path, folder: Path, asked: Asked) -> None:
    """What is served, into a version folder."""
    from shardwright.compiler.frontend.onnx.beside import files_beside

    is_traced = zipfile.is_zipfile(path)
    if is_traced or (path.is_file() and is_model(path.read_bytes()[:1])):
        if asked.weights or asked.program:
            what = "traced module" if is_traced else "saved model"
            raise required("--weights and --program", "a NEFF", f"{path}, which is a {what}")
        shutil.copyfile(path, folder / (TRACED if is_traced else SAVED))
        for file in () if is_traced else files_beside(path.read_bytes(), path.parent):
            place = folder / file.relative_to(path.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        return
    container = program_container(path, asked.program)
    (folder / NEFF).write_bytes(container.data)
    program = read_program(container)
    given: dict[str, np.ndarray] = {}
    for file in asked.weights:
        found = inputs_of(program, [file])
        if not found:
            raise required(
                "--weights", f"arrays named {', '.join(program.inputs)}", f"none in {file}"
            )
        given |= found
    if given:
        stream = io.BytesIO()
        numbered = enumerate(program.inputs)
        arrays = [(f"arg{k}", given[name]) for k, name in numbered if name in given]
        write_arrays(stream, arrays)
        (folder / WEIGHTS).write_bytes(stream.getvalue())


def _check_others(model: Path, version: int, text: str) -> None:
    """That other versions, which share `config.pbtxt`, still have theirs."""
    others = sorted(p.name for p in model.iterdir() if p.name.isdigit() and p.name != str(version))
    config = model / CONFIG
    if others and config.exists() and config.read_text() != text:
        raise LoadError(
            "SW_TRITON_CONFIG",
            f"versions of a model share {config}, which version {', '.join(others)} needs as it is",
            hint="take another --name, or the same flags for a file of the same names and types",
        )
