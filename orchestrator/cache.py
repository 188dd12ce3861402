"""The content-addressed store behind both caches: unit results by unit key, plans by plan key.

An entry is one file: a checksum line and the payload. It is written to a temporary file and
renamed, so readers see all of it or nothing; a damaged entry is set aside and counts as a miss. A
lock per key makes concurrent jobs compute an entry once. Only results and deterministic compile
errors are stored, never an interrupt or a crash. A full or read-only disk costs the entry, not the
job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

from filelock import FileLock, Timeout

from compiler.diagnostics import UsageError
from compiler.neff.writer import write_atomic

_MAGIC = b"SWCACHE1"


def default_directory(configured: str) -> Path:
    """The configured directory, else NEURON_COMPILE_CACHE_URL (local paths), else the user's cache
    directory.

    Raises UsageError for a URL that is not local: remote stores are not available yet.
    """
    location = configured or os.environ.get("NEURON_COMPILE_CACHE_URL", "")
    if not location:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(base) / "shardwright"
    url = urlparse(location)
    if url.scheme not in ("", "file"):
        raise UsageError(
            "SW_CACHE_URL",
            f"the cache requires a local directory, got {location}",
            None,
            "set cache.dir or unset NEURON_COMPILE_CACHE_URL",
        )
    return Path(url.path).expanduser()


def entry_payload(data: bytes) -> bytes | None:
    """What the bytes of an entry hold; None when they are damaged, or no entry."""
    head, payload = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    return payload if head == _MAGIC + hashlib.sha256(payload).digest() else None


class Cache:
    """A directory of entries, `<kind>/<2 hex>/<key>`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.warnings: list[str] = []

    def path(self, kind: str, key: str) -> Path:
        """Where the entry of `key` is."""
        return self.directory / kind / key[:2] / key

    def get(self, kind: str, key: str) -> bytes | None:
        """The payload, or None on a miss.

        A damaged entry is renamed to `.corrupt` and is a miss.
        """
        path = self.path(kind, key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        payload = entry_payload(data)
        if payload is not None:
            return payload
        self.warnings.append(f"cache entry {path} is damaged; it is set aside and computed again")
        with contextlib.suppress(OSError):
            path.rename(path.with_suffix(".corrupt"))
        return None

    def put(self, kind: str, key: str, payload: bytes) -> bool:
        """Store an entry; on a full or read-only disk, warn and go on. Whether it is stored."""
        path = self.path(kind, key)
        try:
            write_atomic(path, _MAGIC + hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            self.warnings.append(
                f"cannot store cache entry {path}: {error.strerror}; going on without it"
            )
            return False
        return True

    def claim(self, kind: str, key: str) -> Callable[[], None] | None:
        """Take the key's lock without waiting: what gives it back, or None while another job, or
        another part of this one, holds it. The lock of a process that died is free.

        No lock on a read-only disk.
        """
        path = self.path(kind, key).with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            guard = FileLock(path)
            guard.acquire(blocking=False)
        except Timeout:
            return None
        except OSError as error:
            self.warnings.append(f"cannot lock {path}: {error.strerror}; going on without it")
            return lambda: None
        return guard.release
