"""The cache of a job: a directory of this host, and where hosts share one, a store behind it.

What the shared store has is copied into the directory when it is used. Entries are checked whenever
they are read; a damaged one is set aside and counts as a miss. A lock per key makes concurrent jobs
compute an entry once. Only results and deterministic compile errors are stored, never an interrupt
or a crash. A place that refuses (a full or read-only disk, a service that is away) is warned about
once; it costs entries, not the job.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

from shardwright.orchestrator.cache.entry import (
    GIB,
    NOTHING_KNOWN,
    About,
    Entry,
    EntryName,
    pack_entry,
    unpack_entry,
)
from shardwright.orchestrator.cache.local import LocalStore
from shardwright.orchestrator.cache.location import locate
from shardwright.orchestrator.cache.remote import S3Store
from shardwright.orchestrator.cache.store import Release, Store, StoreError, nothing
from shardwright.orchestrator.cache.tally import Tally
from shardwright.orchestrator.config.config import CacheConfig

READ, WRITTEN = "read", "written"
REFUSED = "-refused"
"""What the kinds of remembered failures end with."""
_Answer = TypeVar("_Answer")
_AT_ONCE = 16
"""Our choice: a round trip takes 10 to 50 ms, a job has tens of units."""


class Cache:
    """Entries of a directory, and of the `shared` store behind it. What was stored before `since_s`
    (Unix time) is removed when it is asked for, also where a first writer wins: what is computed
    instead is what others find. `failed_since_s` is the same of remembered failures alone."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int = 10 * GIB,
        shared: Store | None = None,
        since_s: float = 0.0,
        failed_since_s: float = 0.0,
    ) -> None:
        self.local = LocalStore(directory, max_bytes)
        self.stores: tuple[Store, ...] = (self.local, *([shared] if shared else []))
        self.tally = Tally(directory)
        self.poll_s = max(store.poll_s for store in self.stores)  # for a lock that another holds
        self._since_s, self._failed_since_s = since_s, max(since_s, failed_since_s)
        self._told: set[tuple[str, str]] = set()
        self._telling = Lock()
        self.warnings: list[str] = []

    def path(self, kind: str, key: str) -> Path:
        """Where the entry of `key` is on this host."""
        return self.local.path(EntryName(kind, key))

    def bring(self, wanted: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Copy entries of the shared store into the directory, many at a time, since each takes a
        round trip; the (kind, key) of those that it does not have. Nothing where there is none."""
        if len(self.stores) == 1:
            return []
        absent = [item for item in wanted if not self.path(*item).exists()]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(lambda item: self.get(*item), absent))
        return [item for item, data in zip(absent, found, strict=True) if data is None]

    def get(self, kind: str, key: str, here: bool = False) -> bytes | None:
        """The payload, or None on a miss; `here` asks the directory alone."""
        found = self.find(kind, key, here)
        return found.payload if found else None

    def find(self, kind: str, key: str, here: bool = False) -> Entry | None:
        """The entry, with what is known about it, or None on a miss; `here` as in `get`."""
        name = EntryName(kind, key)
        for number, store in enumerate(self.stores[:1] if here else self.stores):
            found = self._read(store, name)
            if found is not None:
                for nearer in self.stores[:number]:
                    self._write(nearer, name, found[0])
                return found[1]
        return None

    def put(
        self,
        kind: str,
        key: str,
        payload: bytes,
        about: About = NOTHING_KNOWN,
        here: bool = False,
    ) -> bool:
        """Store an entry, `here` in the directory alone; where that cannot be, warn and go on.
        Whether it is in the directory."""
        name = EntryName(kind, key)
        data = pack_entry(name, payload, replace(about, stored_s=time.time()))
        stores = self.stores[:1] if here else self.stores
        stored = [self._write(store, name, data) for store in stores]
        return stored[0]

    def set_aside(self, kind: str, key: str) -> None:
        """Have an entry out of the way whose checksum is right and whose payload makes no sense."""
        for store in self.stores:
            self._damaged(store, EntryName(kind, key))

    def claim(self, kind: str, key: str) -> Release | None:
        """Take the key's lock without waiting: what gives it back, or None while another job, or
        another part of this one, holds it. The lock of a process that died is free, that of another
        host that died after a minute. Where a store can have no lock, nothing is locked."""
        held, name = contextlib.ExitStack(), EntryName(kind, key)
        unlocked: Release | None = nothing
        for store in self.stores:
            release = self._asked(store, WRITTEN, partial(store.lock, name), unlocked)
            if release is None:
                held.close()
                return None
            held.callback(release)
        return held.close

    def _read(self, store: Store, name: EntryName) -> tuple[bytes, Entry] | None:
        """The sound entry of a name, packed and unpacked."""
        data = self._asked(store, READ, lambda: store.read(name), None)
        if data is None:
            return None
        entry = unpack_entry(data, name)
        if entry is None:
            self._damaged(store, name)
            return None
        # Later than now is another host's clock, which says nothing about before and after.
        since_s = self._failed_since_s if name.kind.endswith(REFUSED) else self._since_s
        if since_s and not since_s <= entry.about.stored_s <= time.time():
            self._asked(store, WRITTEN, lambda: store.remove(name), False)
            return None
        return data, entry

    def _damaged(self, store: Store, name: EntryName) -> None:
        self.warnings.append(
            f"cache entry {name} of {store.place} is damaged; it is computed again"
        )
        with contextlib.suppress(StoreError):
            store.set_aside(name)

    def _write(self, store: Store, name: EntryName, data: bytes) -> bool:
        def write() -> bool:
            store.write(name, data)
            return True

        return self._asked(store, WRITTEN, write, False)

    def _asked(
        self, store: Store, done: str, request: Callable[[], _Answer], otherwise: _Answer
    ) -> _Answer:
        """What a store answers, `otherwise` where it refuses, or has refused and is not asked
        again. That is told once for reading and once for writing a store."""
        if not store.is_asked_again and (store.place, done) in self._told:
            return otherwise
        try:
            return request()
        except StoreError as error:
            with self._telling:
                is_told = (store.place, done) in self._told
                self._told.add((store.place, done))
            if not is_told:
                text = f"the cache at {store.place} cannot be {done}: {error}; going on without it"
                self.warnings.append(text)
            return otherwise


def open_cache(settings: CacheConfig) -> Cache:
    """The cache of a job. Raises UsageError for a place we cannot use."""
    location = locate(settings.dir, settings.local_dir)
    shared = S3Store(location.url) if location.url else None
    since = settings.since_s, settings.failed_since_s
    return Cache(location.directory, int(settings.max_gib * GIB), shared, *since)
