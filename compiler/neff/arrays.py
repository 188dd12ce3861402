"""Arrays in .npz files, of every type that programs have.

NumPy has no name for bf16 and the fp8 types: it writes their bits as `V2` and `V1`, reads those as
bytes without a type, and does not read what it wrote of f8E5M2 (`<f1`). What is written here says
beside each array, in the comment of its member, which type it has and what its program calls it;
what others wrote has the type that a program asks for.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from shardwright.compiler.dtypes import DType

_SUFFIX = ".npy"
_UNREADABLE, _BYTE = b"'descr': '<f1'", b"'descr': '|V1'"
_DAMAGED = (TypeError, SyntaxError, RuntimeError, MemoryError, OverflowError, EOFError, zlib.error)
"""What `zipfile` and NumPy raise for bytes that are no array, besides ValueError and OSError. A
RuntimeError is an archive that is encrypted, or compressed in a way that is not known."""
_UNNAMED = frozenset((DType.BF16, DType.F8E4M3, DType.F8E4M3FN, DType.F8E5M2))


@dataclass(frozen=True, slots=True)
class Stored:
    """An array of a file; `name` is what the program that made it calls it, if one did."""

    array: np.ndarray
    name: str = ""

    @property
    def is_untyped(self) -> bool:
        """Whether elements are bytes."""
        return self.array.dtype.type is np.void

    @property
    def kind(self) -> str:
        """What elements are, for people."""
        size = self.array.dtype.itemsize
        return f"{size} bytes each, without a type" if self.is_untyped else str(self.array.dtype)

    def is_taken_as(self, dtype: DType) -> bool:
        """Whether there are values of that type: numbers are converted, bytes taken as they are,
        where they have the size of a type that NumPy has no name for."""
        given = self.array.dtype
        if self.is_untyped:
            return dtype in _UNNAMED and not given.names and given.itemsize == dtype.bytes
        return given.kind in "biufV"

    def of_type(self, dtype: DType) -> np.ndarray:
        """The values as `dtype`. Raises UsageError where ml_dtypes is needed and missing."""
        if self.is_untyped:
            return self.array.view(dtype.numpy)
        return self.array.astype(dtype.numpy, copy=False)


def read_arrays(path: Path) -> dict[str, Stored]:
    """The arrays of a .npz file by name.

    Raises OSError, ValueError and BadZipFile for anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(_SUFFIX)]
            return {m.filename.removesuffix(_SUFFIX): _read(archive, m) for m in members}
    except _DAMAGED as error:
        raise ValueError(f"no arrays: {error}") from error


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Stored:
    data = archive.read(member)
    head = data[:128].replace(_UNREADABLE, _BYTE, 1)  # of as many bytes
    array: np.ndarray = npy.read_array(io.BytesIO(head + data[128:]), allow_pickle=False)
    about = _about(member.comment)
    stored = Stored(array, str(about.get("name", "")))
    dtype = next((d for d in _UNNAMED if d.value == about.get("dtype")), None)
    if dtype is None or not stored.is_untyped or not stored.is_taken_as(dtype):
        return stored
    return Stored(stored.of_type(dtype), stored.name)


def _about(comment: bytes) -> dict[str, Any]:
    """What is told of an array; nothing where others wrote the comment."""
    try:
        found = json.loads(comment)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def write_arrays(
    file: IO[bytes],
    arrays: Iterable[tuple[str, np.ndarray]],
    names: Mapping[str, str] | None = None,
) -> None:
    """Write arrays as a .npz file, one after the other; `names` are what a program calls them."""
    with zipfile.ZipFile(file, "w") as archive:
        for key, array in arrays:
            dtype = DType.from_numpy(array.dtype)
            told = {"name": (names or {}).get(key, ""), "dtype": dtype.value}
            member = zipfile.ZipInfo(f"{key}{_SUFFIX}")
            member.comment = json.dumps({n: text for n, text in told.items() if text}).encode()
            plain = array.view(f"V{dtype.bytes}") if dtype in _UNNAMED else array
            with archive.open(member, "w", force_zip64=True) as out:
                npy.write_array(out, plain, allow_pickle=False)
