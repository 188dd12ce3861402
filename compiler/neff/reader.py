"""Checks and unpacks containers.

Whatever it does not know or cannot verify, it refuses with a code; it never crashes. Codes:
SW_NEFF_MAGIC (not ours), SW_NEFF_VERSION (newer format or unknown feature), SW_NEFF_TRUNCATED
(short file), SW_NEFF_CHECKSUM (damaged), SW_NEFF_CONTENT (a table or section that makes no sense),
SW_NEFF_KIND (another kind of file), SW_NEFF_SIZE (more than a reader takes memory for),
SW_NEFF_PATH (a file that leads out of its bundle). A checksum is no signature: whoever writes a
file can make its checksums right, so sizes are bounded before memory is taken.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.neff.format import (
    DTYPES,
    HEADER_BYTES,
    KINDS,
    KNOWN_FEATURES,
    MAGIC,
    MAJOR,
    MAX_FILE_BYTES,
    MAX_RAW_BYTES,
    Header,
    Section,
)
from shardwright.compiler.support.files import inflated, read_regular
from shardwright.compiler.support.schema import PLAIN, Rule

_META = Rule(f"a map with {PLAIN.what}", lambda v: isinstance(v, dict) and PLAIN.holds(v))
_REBUILD = "the file is damaged; compile again or copy the bundle again"


class Container:
    """A checked container: header and table are verified on opening, a section when it is read."""

    def __init__(self, data: bytes | memoryview, name: str = "<memory>", kind: str | None = None):
        self.name = name
        self.data = memoryview(data)
        self.header = _checked_header(self.data, name)
        if kind is not None and self.header.kind != kind:
            raise LoadError(
                "SW_NEFF_KIND", f"{name}: a {kind} file is required, got a {self.header.kind} file"
            )
        toc = _checked_toc(self.data, self.header, name)
        try:
            self.meta: dict[str, Any] = toc["meta"]
            rows = [_section(row) for row in toc["sections"]]
            _META.require(self.meta, "meta")
            if len({row.name for row in rows}) < len(rows):
                raise ValueError("two sections of one name")
        except (KeyError, TypeError, ValueError) as error:
            raise _content(name, f"table of contents: {error!r}") from error
        self.sections = {row.name: row for row in rows}
        _check_layout(self.data, rows, self.header, name)

    @classmethod
    def open(cls, path: Path, kind: str | None = None, inside: Path | None = None) -> Container:
        """Read `path`, which must lie `inside` of a directory if one is given, links followed.

        Raises LoadError when the file is missing, damaged or of another kind.
        """
        if inside is not None and not path.resolve().is_relative_to(inside.resolve()):
            raise LoadError(
                "SW_NEFF_PATH",
                f"{path}: a file inside of {inside} is required, this leads to {path.resolve()}",
                None,
                "copy the bundle with its files, not with links to them (cp -RL)",
            )
        try:
            data = read_regular(path, MAX_FILE_BYTES)
        except IsADirectoryError as error:
            raise LoadError(
                "SW_NEFF_MISSING",
                f"{path}: a file is required, got a directory",
                hint=_programs_hint(path),
            ) from error
        except OSError as error:
            raise LoadError("SW_NEFF_MISSING", f"{path}: {error.strerror or error}") from error
        return cls(data, str(path), kind)

    def read(self, name: str) -> Any:
        """The content of a section: bytes, or a read-only NumPy column."""
        row = self.sections.get(name)
        if row is None:
            raise _content(self.name, f"section {name} is missing")
        stored = self.data[row.offset : row.offset + row.stored]
        if zlib.crc32(stored) != row.crc32:
            raise _damaged(f"{self.name}: section {name}")
        raw = _decompressed(stored, row, self.name)
        if not row.dtype:
            return bytes(raw)
        try:
            return np.frombuffer(raw, dtype=row.dtype).reshape(row.shape)
        except ValueError as error:  # sizes beyond what an array can have, one of them 0
            raise _content(self.name, f"section {name}: {error}") from error

    def verify(self) -> None:
        """Read every section."""
        for name in self.sections:
            self.read(name)


def _programs_hint(folder: Path) -> str:
    """Where the programs of a bundle are, if a folder is one."""
    found = sorted(folder.glob("programs/*.neff"))
    if not found:
        return "name a file of it"
    return (
        f"a bundle's {len(found)} programs are below {folder}/programs, for example `shardwright"
        f" neff info {found[0]}`; `shardwright neff verify {folder}` takes the whole bundle"
    )


def _section(row: list[Any]) -> Section:
    name, offset, stored, raw, codec, crc32, dtype, shape = row
    for text in (name, codec, dtype):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is no text")
    for number in (offset, stored, raw, crc32, *shape):
        if type(number) is not int or number < 0:
            raise TypeError(f"{number!r} is no size")
    return Section(name, offset, stored, raw, codec, crc32, dtype, tuple(shape))


def _content(name: str, what: str) -> LoadError:
    return _damaged(f"{name}: {what}", "SW_NEFF_CONTENT")


def _damaged(message: str, code: str = "SW_NEFF_CHECKSUM") -> LoadError:
    return LoadError(code, message, None, _REBUILD)


def _checked_header(data: memoryview, name: str) -> Header:
    if len(data) < HEADER_BYTES:
        raise LoadError(
            "SW_NEFF_TRUNCATED", f"{name}: {HEADER_BYTES} bytes of header required, got {len(data)}"
        )
    header = Header.unpack(bytes(data[:HEADER_BYTES]))
    if header.magic != MAGIC:
        raise LoadError("SW_NEFF_MAGIC", f"{name}: not a Shardwright NEFF (magic {header.magic!r})")
    if header.major != MAJOR or header.features & ~KNOWN_FEATURES:
        raise LoadError(
            "SW_NEFF_VERSION",
            f"{name}: format {MAJOR} with features {KNOWN_FEATURES:#x} required,"
            f" got format {header.major} with features {header.features:#x}",
            None,
            "use the Shardwright release that wrote the file, or compile again",
        )
    if header.pack() != bytes(data[:HEADER_BYTES]) or header.kind not in KINDS:
        raise _damaged(f"{name}: header")
    if header.file_bytes != len(data):
        message = f"{name}: {header.file_bytes} bytes required, got {len(data)}"
        raise _damaged(message, "SW_NEFF_TRUNCATED")
    return header


def _checked_toc(data: memoryview, header: Header, name: str) -> dict[str, Any]:
    toc = data[header.toc_offset : header.toc_offset + header.toc_bytes]
    good = len(toc) == header.toc_bytes and zlib.crc32(toc) == header.toc_crc32
    if not good or hashlib.sha256(toc).digest() != header.toc_sha256:
        raise _damaged(f"{name}: table of contents")
    try:
        table = msgpack.unpackb(bytes(toc))
    except (ValueError, msgpack.UnpackException) as error:
        raise _content(name, "table of contents is not msgpack") from error
    if not isinstance(table, dict):
        raise _content(name, "table of contents is not a map")
    return table


def _check_layout(data: memoryview, rows: list[Section], header: Header, name: str) -> None:
    """Sections in order, in the file, of known types, with zeros between, which no CRC covers."""
    end = HEADER_BYTES
    size = sum(row.raw for row in rows)
    if size > MAX_RAW_BYTES:
        raise LoadError(
            "SW_NEFF_SIZE", f"{name}: at most {MAX_RAW_BYTES} bytes unpacked are read, got {size}"
        )
    for row in sorted(rows, key=lambda r: r.offset):
        if row.offset < end or row.offset + row.stored > header.toc_offset:
            raise _content(name, f"section {row.name} overlaps another or leaves the file")
        if row.dtype and row.dtype not in DTYPES:
            raise _content(name, f"section {row.name} has type {row.dtype}, known are {DTYPES}")
        if row.dtype and math.prod(row.shape) * np.dtype(row.dtype).itemsize != row.raw:
            raise _content(name, f"section {row.name}: shape {row.shape} is not {row.raw} bytes")
        _check_padding(data[end : row.offset], name)
        end = row.offset + row.stored
    _check_padding(data[end : header.toc_offset], name)


def _check_padding(gap: memoryview, name: str) -> None:
    if any(gap):
        raise _damaged(f"{name}: padding between sections")


def _decompressed(stored: memoryview, row: Section, name: str) -> bytes | memoryview:
    if row.codec == "raw" and row.stored == row.raw:
        return stored
    if row.codec != "zstd":
        raise _content(name, f"section {row.name} has codec {row.codec}")
    try:
        raw = inflated(stored, row.raw)
    except ValueError as error:
        raise _content(name, f"section {row.name}: {error}") from error
    if len(raw) != row.raw:
        raise _content(name, f"section {row.name}: {row.raw} bytes required, got {len(raw)}")
    return raw
