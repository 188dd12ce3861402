"""A file of `torch.export.save`: what it may have in it, and the program in it.

torch reads such files with more power than a program needs: it unpickles objects, evaluates
expressions of sizes, and calls what nodes name. So a file is looked through before torch reads it:
entries are not compressed (no file takes more memory than its size), objects are tensors alone,
sizes are numbers, and what is called are torch's operators.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import DiagnosticError, ImportRuleError
from shardwright.compiler.frontend.pytorch.host_graph import NUMBERS, SIZES
from shardwright.compiler.frontend.user_code import called

if TYPE_CHECKING:
    import torch

START = b"PK\x03\x04"
_OLD = "serialized_exported_program.json"
"""The graph in a file of torch before 2.9, at the top of the zip."""
_GRAPH = re.compile(r"[^/]+/models/[^/]+\.json")
_CONSTANTS = re.compile(r"[^/]+/data/constants/[^/]+_constants_config\.json")
_SIZE_KEYS = ("as_expr", "expr_str")
_CALLED = re.compile(
    r"torch\.ops(?!\.aten\.from_file\b)\.(?!_)\w+(\.(?!__)\w+){1,2}|math\.(?!_)\w+"
    rf"|_operator\.({'|'.join(NUMBERS)})|torch\.({'|'.join(SIZES)})"
)
"""What a node may name: `torch.ops.aten.add.Tensor`, and Python's and torch's functions of sizes.
"""
_DAMAGED = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError),
    *(zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, AssertionError, OSError),
)
_HINT = "write the file again: torch.export.save(torch.export.export(module, args), path)"


def is_program(data: bytes) -> bool:
    """Whether a file holds an exported program, by the names of its entries."""
    if not data.startswith(START):
        return False
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except _DAMAGED:
        return False
    return any(name == _OLD or _GRAPH.fullmatch(name) for name in names)


def read_program(data: bytes) -> torch.export.ExportedProgram:
    """The program of a file.

    Raises: ImportRuleError SW_TORCH_FILE for damage, for what no program needs, and for what this
    torch does not read; UsageError where torch is not installed.
    """
    try:
        check(data)
    except DiagnosticError:
        raise
    except _DAMAGED as error:
        raise refused(f"{type(error).__name__}: {error}") from error
    with called("importing torch"):
        import torch
    forced = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # of torch.load: tensors, and no other objects
    before = os.environ.get(forced)
    os.environ[forced] = "1"
    try:
        program = torch.export.load(io.BytesIO(data))
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise refused(f"{type(error).__name__}: {said[0]}, by torch {torch.__version__}") from error
    finally:
        os.environ.pop(forced) if before is None else os.environ.update({forced: before})
    if getattr(program, "_guards_code", None):  # Python that torch would run to check arguments
        program._guards_code = []
    return program


def refused(given: str) -> ImportRuleError:
    """The error of a file that is not read."""
    return ImportRuleError(
        "SW_TORCH_FILE",
        f"a program that torch.export.save wrote, of fixed shapes, is required, got {given}",
        hint=_HINT,
    )


def check(data: bytes) -> None:
    """Look through a file. Raises ImportRuleError for what no program needs, and `_DAMAGED` for
    what is no such file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise refused(f"entry {info.filename!r}, which is compressed")
        if sum(info.file_size for info in infos) > len(data):
            raise refused("entries that are larger than the file")
        for info in infos:
            if _CONSTANTS.fullmatch(info.filename):
                _check_constants(json.loads(archive.read(info)))
            elif info.filename == _OLD or _GRAPH.fullmatch(info.filename):
                _check_graph(json.loads(archive.read(info)))


def _check_constants(found: Any) -> None:
    for name, row in found["config"].items():
        if not row["path_name"].startswith("tensor_"):
            raise refused(f"constant {name!r}, an object of Python's")


def _check_graph(found: Any) -> None:
    for row in _mappings(found):
        if any(key in row for key in _SIZE_KEYS):
            raise ImportRuleError(
                "NCC_EMOD025",
                "every dimension requires a static size, got a program with dynamic shapes",
                hint="export it without dynamic_shapes, once for each shape",
            )
        target = row.get("target")
        if "metadata" in row and isinstance(target, str) and not _CALLED.fullmatch(target):
            raise refused(f"a call of {target!r}, which is no operator")


def _mappings(found: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings of a document, however deep."""
    waiting = [found]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
