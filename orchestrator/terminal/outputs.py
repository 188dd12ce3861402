"""What a command leaves for its user: written whole or not at all, and where that cannot be, an
error that says what refused, which place, and what to do.

A cache and an event log are not needed for the answer; they warn and go on by themselves.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.support.files import write_atomic
from shardwright.orchestrator.report.text import size_text

OUT = "--out"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_MISPLACED = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
_BROKEN = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)


def of_the_disk(error: Exception, place: str, flag: str) -> UsageError | None:
    """The error to show for one that says that a place cannot be written, not that a program is
    wrong; `place` is what it is where the error does not say."""
    if not isinstance(error, OSError):
        return None
    is_disks = error.errno in (*_FULL, *_FORBIDDEN, *_MISPLACED, *_BROKEN)
    return refused(error, error.filename or place, flag) if is_disks else None


def refused(error: OSError, path: Path | str, flag: str = OUT) -> UsageError:
    """The error to show for a place that cannot be written; `flag` is what names it."""
    return UsageError(
        "SW_OUTPUT",
        f"{flag} requires a place that can be written, got {path}: {error.strerror or error}",
        hint=_advice(error, Path(path)),
    )


@contextmanager
def writing(path: Path, flag: str = OUT) -> Iterator[None]:
    """Inside, `path` is written and nothing else. Raises UsageError (SW_OUTPUT) where it cannot
    be."""
    try:
        yield
    except OSError as error:
        raise refused(error, path, flag) from error


def write(path: Path, data: bytes | str, flag: str = OUT) -> None:
    """Write a file, and the folders it lies in; into a device or a pipe, which is not replaced.
    Raises UsageError (SW_OUTPUT)."""
    content = data.encode() if isinstance(data, str) else data
    with writing(path, flag):
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
        else:
            write_atomic(path, content)


def prepare(folder: Path, flag: str = OUT) -> Path:
    """The folder, made if it is not there: what will refuse does so before the work, not after it.
    Raises UsageError (SW_OUTPUT)."""
    with writing(folder, flag):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            number = errno.EROFS if is_read_only else errno.EACCES
            raise OSError(number, os.strerror(number))
    return folder


@contextmanager
def held(folder: Path, flag: str = OUT) -> Iterator[Path]:
    """The folder as `prepare` makes it, which nobody else holds until the block ends: files of two
    writers, each of them whole, are not one answer. The lock of a process that died is free.
    Raises UsageError (SW_OUTPUT), also where another process or thread holds it."""
    lock = prepare(folder, flag) / f".writing{flag}.lock"
    guard = FileLock(lock)
    with writing(folder, flag):
        try:
            guard.acquire(blocking=False)
        except Timeout as error:
            raise UsageError(
                "SW_OUTPUT",
                f"{flag} requires a folder that nobody else writes, got {folder}, which a running"
                " command writes",
                hint="wait until that one ends, or name another folder",
            ) from error
    try:
        yield folder
    finally:
        with suppress(OSError):  # still locked: who opened it meanwhile looks for it again
            lock.unlink()
        guard.release()


def _advice(error: OSError, path: Path) -> str:
    if error.errno in _FULL:
        return f"{_free(path)}make room, or name another place; finished units are in the cache"
    if error.errno in _MISPLACED:
        return "a file is in the place of a folder, or the other way round: name another place"
    if error.errno in _FORBIDDEN:
        return "name a folder that you may write to; finished units are in the cache"
    return "name another place; finished units are in the cache"


def _free(path: Path) -> str:
    """What is left where the path would be; nothing where nobody knows."""
    there = next((p for p in (path, *path.absolute().parents) if p.exists()), Path("/"))
    try:
        return f"{size_text(shutil.disk_usage(there).free)} are free in {there}: "
    except OSError:
        return ""
