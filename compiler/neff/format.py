"""The container: a fixed header, aligned sections, a msgpack table of contents at the end.

    header   256 bytes: magic, format version, header CRC, feature bits, kind, place, length and
    CRC of the table of
             contents, its sha256, file size
    sections 64-byte aligned; raw or zstd; CRC32 of the stored bytes; little-endian columns or
    opaque bytes table    msgpack {meta, sections: [name, offset, stored, raw, codec, crc32, dtype,
    shape]}

The table carries the CRC of every section and the header the sha256 of the table, so one flipped
bit anywhere is found. Nothing is timed, named after a host, or pickled: equal content gives equal
bytes. The header is 256 bytes and not a page so that a core file stays below 4 KiB. `writer.py`
packs, `reader.py` checks and unpacks.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

MAGIC = b"SWNEFF\r\n"
MAJOR = 2
MINOR = 0
HEADER_BYTES = 256
ALIGNMENT = 64
KINDS = (
    "program",
    "core",
    "cores",
    "manifest",
    "bundle",
    "unit",
    "checkpoint",
    "state",
    "pipeline",
)
PROGRAM_SECTION = "program/"
"""In front of the name of a program that is a section of another file."""
DTYPES = ("|u1", "<i4", "<i8", "<f4", "<f8")  # the only column types a reader accepts
MAX_FILE_BYTES = MAX_RAW_BYTES = 2**32
"""Our choice: what a reader takes memory for, stored and unpacked; programs are kilobytes to some
hundred megabytes."""
FEATURE_ZSTD = 1
FEATURE_SUBGRAPHS = 2  # functions have a subgraph per physical core of a logical NeuronCore
FEATURE_BORDERS = 4  # kernels follow each other without a barrier
FEATURE_ROW_SUMS = 8  # instructions have a second destination
KNOWN_FEATURES = FEATURE_ZSTD | FEATURE_SUBGRAPHS | FEATURE_BORDERS | FEATURE_ROW_SUMS

_HEADER = struct.Struct("<8sHHIQ16sQQI32sQ")


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed fields at the start of every file."""

    kind: str
    features: int
    toc_offset: int
    toc_bytes: int
    toc_crc32: int
    toc_sha256: bytes
    file_bytes: int
    major: int = MAJOR
    minor: int = MINOR
    magic: bytes = MAGIC

    def pack(self) -> bytes:
        """The header bytes, with the CRC over all of them (its own field as zero)."""
        blank = self._packed(0)
        return self._packed(zlib.crc32(blank))

    def _packed(self, crc: int) -> bytes:
        begins = (self.magic, self.major, self.minor, crc, self.features, self.kind.encode())
        toc = (self.toc_offset, self.toc_bytes, self.toc_crc32, self.toc_sha256)
        return _HEADER.pack(*begins, *toc, self.file_bytes).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Read the fields without judging them; `reader.py` does."""
        magic, major, minor, _, features, kind, at, size, crc, sha, end = _HEADER.unpack_from(data)
        name = kind.rstrip(b"\0").decode("ascii", "replace")
        return cls(name, features, at, size, crc, sha, end, major, minor, magic)


@dataclass(frozen=True, slots=True)
class Section:
    """One row of the table of contents; `dtype` is empty for opaque bytes."""

    name: str
    offset: int
    stored: int
    raw: int
    codec: str
    crc32: int
    dtype: str
    shape: tuple[int, ...]
