"""A traced module as one file: a zip of plain entries, which needs no code to be read.

`traced.json` says what it is, `parts/N.neff` are its NEFF files, `tensors/N` the bytes of its
tensors in torch's layout. Entries are not compressed, so that no file takes more memory than it has
bytes; what is compressed is inside of NEFF files, whose sizes their reader checks.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shardwright.compiler.diagnostics import DiagnosticError, LoadError
from shardwright.compiler.frontend.pytorch.host_graph import HostGraph
from shardwright.compiler.frontend.pytorch.signature import (
    Leaf,
    Signature,
    leaf_of,
    of_plain,
    plain,
    row_of,
)
from shardwright.compiler.frontend.pytorch.types import bytes_of
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.reader import Container
from shardwright.orchestrator.terminal.outputs import write
from shardwright.orchestrator.traced.parts import CompiledPart, Content, TracedPart, needed
from shardwright.orchestrator.traced.report import PartitionReport

FORMAT = 1
ABOUT = "traced.json"
_DAMAGED = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError),
    *(zipfile.BadZipFile, NotImplementedError, EOFError),
)
"""What `zipfile`, `json` and a reader of plain data raise for bytes that are none of ours."""


def content(module: Content) -> bytes:
    """The bytes of the file of a traced module."""
    tensors = [row_of(Leaf.of(name, tensor)) for name, tensor in module.tensors.items()]
    about = {
        "format": FORMAT,
        "name": module.name,
        "made_by": dict(module.made_by),
        "signature": plain(module.signature),
        "parts": [_part_data(part) for part in module.parts],
        "tensors": tensors,
        "report": module.summary.as_dict(),
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        _put(archive, ABOUT, json.dumps(about).encode())
        for number, part in enumerate(module.parts):
            if isinstance(part, CompiledPart):
                _put(archive, f"parts/{number}.neff", part.neff)
        for number, tensor in enumerate(module.tensors.values()):
            _put(archive, f"tensors/{number}", bytes_of(tensor))
    return stream.getvalue()


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """An entry of the time zero, so that equal modules are equal files."""
    archive.writestr(zipfile.ZipInfo(name), data)


def save(module: Content, path: Path) -> None:
    """Write a traced module. Raises UsageError where it cannot be written."""
    write(path, content(module), "path")


def load(path: Path | IO[bytes]) -> Content:
    """What a file holds. Raises LoadError for another file, a damaged one, and one of
    operators or classes that are missing here."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive)
    except DiagnosticError:
        raise
    except OSError as error:
        raise LoadError(
            "SW_TORCH_FILE", f"cannot read {path}: {error.strerror or error}"
        ) from error
    except _DAMAGED as error:
        raise LoadError(
            "SW_TORCH_FILE",
            f"{path}: a file that shardwright.torch.trace(...).save wrote is required, got"
            f" {type(error).__name__}: {error}",
            hint="trace and save the module again",
        ) from error


def _read(archive: zipfile.ZipFile) -> Content:
    about = json.loads(_entry(archive, ABOUT))
    if about["format"] != FORMAT:
        raise LoadError(
            "SW_TORCH_FILE",
            f"a file of format {FORMAT} is required, got {about['format']!r}",
            hint="trace the module again with this release",
        )
    leaves = [leaf_of(row) for row in about["tensors"]]
    tensors = {
        leaf.name: leaf.tensor(_entry(archive, f"tensors/{number}"))
        for number, leaf in enumerate(leaves)
    }
    signature = of_plain(about["signature"])
    parts = tuple(_part(archive, number, row) for number, row in enumerate(about["parts"]))
    _check_names(signature, parts, tensors)
    return Content(
        name=str(about["name"]),
        signature=signature,
        parts=parts,
        tensors=tensors,
        summary=PartitionReport.of_dict(about["report"]),
        made_by={str(key): str(value) for key, value in about["made_by"].items()},
    )


def _check_names(
    signature: Signature, parts: Sequence[TracedPart], tensors: Mapping[str, Any]
) -> None:
    """That everything that is read is there. Raises ValueError."""
    known = {each.name for each in signature.inputs if isinstance(each, Leaf)} | set(tensors)
    for part in parts:
        if missing := part.reads - known:
            raise ValueError(f"nothing makes {', '.join(sorted(missing))}")
        known |= part.makes
    changed = {name for _, name in signature.changed}
    if missing := (needed((), signature) | changed) - known:
        raise ValueError(f"nothing makes {', '.join(sorted(missing))}")


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"entry {name} is compressed")
    return archive.read(info)


def _part_data(part: TracedPart) -> dict[str, Any]:
    if not isinstance(part, CompiledPart):
        return {"host": part.as_data()}
    outputs = list(map(row_of, part.outputs))
    return {"weights": list(part.weights), "inputs": list(part.inputs), "outputs": outputs}


def _part(archive: zipfile.ZipFile, number: int, row: Mapping[str, Any]) -> TracedPart:
    if "host" in row:
        return HostGraph.of_data(row["host"])
    neff = _entry(archive, f"parts/{number}.neff")
    container = Container(neff, f"parts/{number}.neff", "program")
    container.verify()
    program = read_program(container)
    counts = len(row["weights"]) + len(row["inputs"]), len(row["outputs"])
    if counts != (len(program.inputs), len(program.outputs)):
        raise ValueError(f"part {number} has other arguments than its NEFF")
    return CompiledPart(
        neff=neff,
        program=program,
        weights=tuple(map(str, row["weights"])),
        inputs=tuple(map(str, row["inputs"])),
        outputs=tuple(map(leaf_of, row["outputs"])),
    )
