"""Entries in a directory, `<kind>/<2 hex>/<key>`, of bounded size.

A file is written to a temporary name and renamed, so readers see all of it or nothing. Its time of
modification is its last use; when the directory is full the files used longest ago go, except those
whose lock is held. Links are never followed to an entry, and only files whose names we make are
ever removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from shardwright.compiler.support.files import write_atomic
from shardwright.orchestrator.cache.entry import GIB, EntryName, read_bounded
from shardwright.orchestrator.cache.store import Release, Stored, StoreError

LOCK, CORRUPT = ".lock", ".corrupt"
_FILE = re.compile(
    r"(?P<key>[0-9a-f]{64})(?P<suffix>|\.lock|\.corrupt)|\.[0-9a-f]{64}\.[0-9a-f]{32}"
)
_FREE = 0.1
"""Part of the bound that is free after an eviction. Our choice: a full cache is listed once for
many new entries."""
_STALE_S = 3600.0
"""Our choice: a temporary file of this age was left by a process that died; writing one takes
milliseconds."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of ours in the directory; `suffix` says what it is beside an entry ("")."""

    path: Path
    name: EntryName | None  # None of a temporary file
    suffix: str
    size: int
    used_s: float


@contextlib.contextmanager
def _diagnosed() -> Iterator[None]:
    """Trouble of the disk as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(error.strerror or str(error)) from error


class LocalStore:
    """A `Store` in a directory that processes may share. `max_bytes` 0 is no bound."""

    is_asked_again = True
    poll_s = 0.05
    """Our choice: a lock takes 0.2 ms to try, a unit takes tens of milliseconds or more."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.place = str(directory)
        self.directory = directory
        self._max_bytes = max_bytes
        self._room: int | None = None  # what may be written before the directory is listed again

    def path(self, name: EntryName) -> Path:
        """Where the entry is."""
        return self.directory / name.kind / name.key[:2] / name.key

    @_diagnosed()
    def read(self, name: EntryName) -> bytes | None:
        """See Store; the entry is marked as used."""
        path = self.path(name)
        try:
            data = read_bounded(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with contextlib.suppress(OSError):  # a cache that may only be read
            os.utime(path)
        return data

    @_diagnosed()
    def write(self, name: EntryName, data: bytes) -> None:
        """See Store."""
        if self._max_bytes:
            self._make_room(len(data))
        write_atomic(self.path(name), data)

    @_diagnosed()
    def lock(self, name: EntryName) -> Release | None:
        """See Store. The lock of a process that died is free."""
        path = self.path(name).with_suffix(LOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _locked(path)

    @_diagnosed()
    def set_aside(self, name: EntryName) -> None:
        """See Store; `cache verify` lists what was set aside."""
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_suffix(CORRUPT))

    def remove(self, name: EntryName) -> bool:
        """See Store."""
        return self.discard(File(self.path(name), name, "", 0, 0.0))

    @_diagnosed()
    def discard(self, file: File) -> bool:
        """Whether a file that nobody is working on was removed, an entry with the file of its
        lock: who waits for the lock looks for its file again."""
        if file.name is None:
            if is_leftover(file):
                file.path.unlink(missing_ok=True)
            return is_leftover(file)
        lock = self.path(file.name).with_suffix(LOCK)
        release = _locked(lock)
        if release is None:
            return False
        try:
            file.path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        finally:
            release()
        return True

    def entries(self) -> Iterator[Stored]:
        """See Store."""
        for file in self.files():
            if file.name is not None and not file.suffix:
                yield Stored(file.name, file.size, file.used_s)

    def files(self) -> Iterator[File]:
        """Every file that is ours, locks and leftovers too."""
        for kind in _directories(self.directory):
            for part in _directories(Path(kind.path)):
                with contextlib.suppress(OSError), os.scandir(part.path) as found:
                    yield from filter(None, (_file(kind.name, item) for item in found))

    def clear_locks(self) -> tuple[int, int]:
        """Remove the files of locks that nobody holds; how many, and how many are held."""
        cleared = [self.discard(file) for file in self.files() if file.suffix == LOCK]
        return sum(cleared), len(cleared) - sum(cleared)

    def _make_room(self, size: int) -> None:
        """Evict when `size` more bytes would pass the bound. What other processes write meanwhile
        is seen when a sixteenth of the bound was written here. Raises StoreError for an entry that
        the bound has no room for."""
        if size > self._max_bytes:
            raise StoreError(f"cache.max_gib requires {size / GIB:.3g} for one entry")
        if self._room is None or self._room < size:
            free = self._max_bytes - sum(file.size for file in self.files())
            if free < size:
                free += self._evict(size + int(_FREE * self._max_bytes) - free)
            self._room = min(free, max(self._max_bytes // 16, size))
        self._room -= size

    def _evict(self, wanted: int) -> int:
        """Remove what was used longest ago until `wanted` bytes are free; how many were freed."""
        release = _locked(self.directory / ".evict")
        if release is None:  # another process is at it
            return 0
        freed = 0
        try:
            for file in sorted(self.files(), key=lambda f: f.used_s):
                if freed >= wanted:
                    break
                with contextlib.suppress(StoreError):
                    freed += file.size if file.suffix != LOCK and self.discard(file) else 0
        finally:
            release()
        return freed


def is_leftover(file: File) -> bool:
    """Whether a file is the temporary one of a process that died."""
    return file.name is None and time.time() - file.used_s > _STALE_S


def _locked(path: Path) -> Release | None:
    guard = FileLock(path)
    try:
        guard.acquire(blocking=False)
    except Timeout:
        return None
    return guard.release


def _directories(path: Path) -> list[os.DirEntry[str]]:
    """The directories in a directory, links to others left out."""
    try:
        with os.scandir(path) as found:
            return [item for item in found if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _file(kind: str, item: os.DirEntry[str]) -> File | None:
    """A directory's item as a file of ours."""
    match = _FILE.fullmatch(item.name)
    if match is None or not item.is_file(follow_symlinks=False):
        return None
    key = match["key"]
    if key is not None and not EntryName.is_name(kind, key):
        return None
    try:
        found = item.stat(follow_symlinks=False)
    except OSError:  # gone meanwhile
        return None
    name = EntryName(kind, key) if key else None
    return File(Path(item.path), name, match["suffix"] or "", found.st_size, found.st_mtime)
