"""Files: read in full or not at all and of bounded size, since somebody else may have put them
there; written whole or not at all."""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path

import zstandard


def read_regular(path: Path, most: int, first: int | None = None, links: bool = True) -> bytes:
    """The bytes of a regular file, or its `first` ones; without `links` the path itself must not
    be one.

    Raises OSError, also for a pipe, a device, and a file of more than `most` bytes.
    """
    # O_NONBLOCK: a pipe that somebody put here must not stop us at open.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no regular file")
        if first is not None:
            return opened.read(first)
        if found.st_size > most:
            raise OSError(f"{path} has {found.st_size} bytes, at most {most} are read")
        return opened.read(found.st_size)


def inflated(data: bytes | memoryview, most: int) -> bytes:
    """What a zstd frame holds. Raises ValueError for damage, for a frame that does not say its
    size, and for one of more than `most` bytes: its own size is what memory is taken for."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= most:
            raise ValueError(f"{size} bytes in a frame, at most {most} are read")
        return bytes(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def write_atomic(path: Path, data: bytes, lasting: bool = False) -> None:
    """Write through a temporary file in the same directory and a rename; with `lasting`, all of it
    is on disk, also the name, when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if lasting:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
