"""Packs sections into container bytes, and writes them atomically."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import zstandard

from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.neff.format import (
    ALIGNMENT,
    FEATURE_ZSTD,
    HEADER_BYTES,
    KINDS,
    MAX_RAW_BYTES,
    Header,
)

COMPRESS_FROM_BYTES = 512
_LEVEL = 3


def pack(
    kind: str,
    meta: Mapping[str, Any],
    sections: Mapping[str, Any],
    compress: bool = True,
    features: int = 0,
) -> bytes:
    """Container bytes of `kind` with msgpack-able `meta` and named sections (bytes or NumPy
    columns). Without `compress` the sections can be mapped as they are. `features` are bits that a
    reader must know to understand the sections. Raises CapacityError for more than any reader
    takes."""
    assert kind in KINDS, kind
    size = sum(c.nbytes if isinstance(c, np.ndarray) else len(c) for c in sections.values())
    if size > MAX_RAW_BYTES:
        raise CapacityError(
            "SW_NEFF_SIZE", f"a file of at most {MAX_RAW_BYTES} bytes is required, got {size}"
        )
    out = bytearray(HEADER_BYTES)
    rows: list[list[Any]] = []
    for name, content in sections.items():
        dtype, shape, raw = section_row(content)
        codec, stored = _stored(raw) if compress else ("raw", raw)
        features |= FEATURE_ZSTD if codec == "zstd" else 0
        out += b"\0" * (-len(out) % ALIGNMENT)
        crc = zlib.crc32(stored)
        rows.append([name, len(out), len(stored), len(raw), codec, crc, dtype, shape])
        out += stored
    out += b"\0" * (-len(out) % ALIGNMENT)
    toc: bytes = msgpack.packb({"meta": _plain(meta), "sections": rows})
    sums = zlib.crc32(toc), hashlib.sha256(toc).digest()
    header = Header(kind, features, len(out), len(toc), *sums, len(out) + len(toc))
    out += toc
    out[:HEADER_BYTES] = header.pack()
    return bytes(out)


def section_row(content: Any) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype or '', shape, raw bytes) of a section."""
    if isinstance(content, np.ndarray):
        column = np.ascontiguousarray(content)
        return column.dtype.newbyteorder("<").str, column.shape, column.tobytes()
    return "", (), bytes(content)


def _stored(raw: bytes) -> tuple[str, bytes]:
    """Zstd where it pays, else raw."""
    if len(raw) >= COMPRESS_FROM_BYTES:
        packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(raw)
        if len(packed) < len(raw):
            return "zstd", packed
    return "raw", raw


def _plain(value: Any) -> Any:
    """Sorted keys all the way down, so that equal content gives equal bytes."""
    if isinstance(value, Mapping):
        return {k: _plain(value[k]) for k in sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
