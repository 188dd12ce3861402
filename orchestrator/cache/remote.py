"""Entries in a bucket, for hosts without a common disk.

The first writer wins: what a second one has is the same bytes. Locks are leases.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cache.bucket import Bucket
from shardwright.orchestrator.cache.entry import EntryName
from shardwright.orchestrator.cache.leases import Leases
from shardwright.orchestrator.cache.store import Release, Stored

_OBJECT = re.compile(r"(?P<kind>[^/]+)/[0-9a-f]{2}/(?P<key>[0-9a-f]{64})")


class S3Store:
    """A `Store` under an s3:// URL. Raises UsageError when boto3 is not installed."""

    is_asked_again = False
    poll_s = 1.0

    def __init__(self, url: str) -> None:
        if importlib.util.find_spec("boto3") is None:
            raise UsageError(
                "SW_CACHE_URL",
                f"a cache at {url} requires the package boto3, which is not installed",
                hint="pip install -e '.[s3]' in the checkout, or name a directory",
            )
        self.place = url
        self._bucket = Bucket(url)
        self._leases = Leases(self._bucket)

    def read(self, name: EntryName) -> bytes | None:
        """See Store."""
        found = self._bucket.get(_key(name))
        return found.data if found else None

    def write(self, name: EntryName, data: bytes) -> None:
        """See Store; an entry that is there stays."""
        self._bucket.put(_key(name), data)

    def lock(self, name: EntryName) -> Release | None:
        """See Store."""
        return self._leases.take(f"{_key(name)}.lock")

    def set_aside(self, name: EntryName) -> None:
        """See Store. A damaged object is removed: nothing else could be put in its place."""
        self._bucket.delete(_key(name))

    def remove(self, name: EntryName) -> bool:
        """See Store."""
        self._bucket.delete(_key(name))
        return True

    def entries(self) -> Iterator[Stored]:
        """See Store."""
        for item in self._bucket.list():
            match = _OBJECT.fullmatch(item.key)
            if match and EntryName.is_name(match["kind"], match["key"]):
                name = EntryName(match["kind"], match["key"])
                yield Stored(name, item.size, item.modified_s)


def _key(name: EntryName) -> str:
    return f"{name.kind}/{name.key[:2]}/{name.key}"
