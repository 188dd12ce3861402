"""The binary file of MXNet's parameters: a list of dense arrays with a name each.

Three releases of an array's header are in files: the first word is a magic number, or, before there
was one, the rank. Everything is little-endian.
Source: `NDArray::Save` and `NDArray::LegacyLoad` of MXNet's sources (src/ndarray/ndarray.cc).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.frontend.graphs import errors
from shardwright.compiler.frontend.graphs.types import Array
from shardwright.compiler.frontend.mxnet.start import FORM

LIST = 0x112
"""The word that a list of arrays begins with."""
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
"""The word that an array begins with; V3 has shapes as NumPy has, in which a rank of 0 is one."""
TYPES: Mapping[int, np.dtype[Any]] = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float64),
    2: np.dtype(np.float16),
    3: np.dtype(np.uint8),
    4: np.dtype(np.int32),
    5: np.dtype(np.int8),
    6: np.dtype(np.int64),
    7: np.dtype(np.bool_),
    8: np.dtype(np.int16),
    9: np.dtype(np.uint16),
    10: np.dtype(np.uint32),
    11: np.dtype(np.uint64),
    12: np.dtype(ml_dtypes.bfloat16),
}
"""Number of an element type in a file -> the type. Source: mshadow's `TypeFlag`."""
_MOST_RANK = 32
_KINDS = ("arg:", "aux:")
"""How names begin that say whether training changes an array by gradients."""


def named(number: int, what: str) -> np.dtype[Any]:
    """The element type of a number. Raises ImportRuleError for one without a counterpart."""
    if number not in TYPES:
        raise errors.untyped(what, f"element type {number}")
    return TYPES[number]


def file_beside(path: Path) -> Path | None:
    """The file with the parameters of a symbol's file: of the last epoch that lies beside it;
    None where none does."""
    prefix = re.sub(r"(-symbol)?\.json$", "", path.name)
    plain = path.with_name(f"{prefix}.params")
    epoch = re.compile(re.escape(prefix) + r"-(\d{4,})\.params")
    try:
        found = [(int(m[1]), each) for each in path.parent.iterdir() if (m := _epoch(epoch, each))]
        return max(found)[1] if found else plain if plain.is_file() else None
    except OSError:
        return None


def _epoch(pattern: re.Pattern[str], path: Path) -> re.Match[str] | None:
    return pattern.fullmatch(path.name) if path.is_file() else None


def read_parameters(data: bytes, file: str) -> dict[str, Array]:
    """Arrays by name, as the symbol has it. Raises ImportRuleError SW_MODEL_FILE for damage,
    SW_MODEL_TYPE for sparse arrays and types without a counterpart."""
    try:
        return _Reader(data, file).arrays()
    except struct.error:
        raise _damaged("a list of arrays that ends in the middle", file) from None


def _damaged(given: str, file: str) -> ImportRuleError:
    return errors.damaged(f"{given} in {Path(file).name}", FORM, Loc(file))


class _Reader:
    """Reads from the front of a file on."""

    def __init__(self, data: bytes, file: str) -> None:
        self._data, self._at, self._file = memoryview(data), 0, file

    def _words(self, form: str) -> tuple[int, ...]:
        form = "<" + form
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _bytes(self, count: int, what: str) -> memoryview:
        if count > len(self._data) - self._at:
            left = len(self._data) - self._at
            raise _damaged(f"{left} of {count} bytes of {what}", self._file)
        self._at += count
        return self._data[self._at - count : self._at]

    def arrays(self) -> dict[str, Array]:
        """All of them."""
        magic, _, count = self._words("QQQ")
        if magic != LIST:
            raise _damaged(f"a file that begins with {magic:#x}, not {LIST:#x},", self._file)
        left = len(self._data) - self._at
        if count > left:
            raise _damaged(f"{count} arrays of {left} bytes", self._file)
        arrays = [self._array(f"array {number}") for number in range(1, count + 1)]
        names = list(self._names(count))
        if self._at != len(self._data):
            raise _damaged(f"{len(self._data) - self._at} bytes behind the last name", self._file)
        if len(set(names)) < len(names):
            raise _damaged("two arrays of one name", self._file)
        return dict(zip(names, arrays, strict=True))

    def _names(self, count: int) -> Iterator[str]:
        (names,) = self._words("Q")
        if names != count:
            raise _damaged(f"{names} names of {count} arrays", self._file)
        for number in range(1, count + 1):
            (size,) = self._words("Q")
            try:
                name = str(self._bytes(size, f"name {number}"), "utf-8")
            except UnicodeDecodeError:
                raise _damaged(f"name {number} of bytes that are no text", self._file) from None
            yield name[4:] if name.startswith(_KINDS) else name

    def _array(self, what: str) -> Array:
        (magic,) = self._words("I")
        if magic in (V2, V3):
            (storage,) = self._words("i")
            if storage:
                raise errors.untyped(f"{what} of {Path(self._file).name}", "a sparse array")
        shape = self._shape(magic, what)
        if not shape and magic != V3:
            raise _damaged(f"{what} without a shape", self._file)
        _, _, number = self._words("iii")
        dtype = named(number, f"{what} of {Path(self._file).name}")
        raw = self._bytes(math.prod(shape) * dtype.itemsize, what)
        return np.frombuffer(raw, dtype).reshape(shape)

    def _shape(self, magic: int, what: str) -> tuple[int, ...]:
        has_magic = magic in (V1, V2, V3)
        (rank,) = self._words("i") if has_magic else (magic,)
        if not 0 <= rank <= _MOST_RANK:
            raise _damaged(f"{what} of {rank} dims", self._file)
        shape = self._words(f"{rank}{'q' if has_magic else 'I'}")
        if any(dim < 0 for dim in shape):
            raise _damaged(f"{what} of shape {list(shape)}", self._file)
        return shape
