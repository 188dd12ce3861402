"""How often the cache had an answer: hits and misses per kind of entry, added up over all jobs in
one file of the directory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from filelock import FileLock, Timeout

from shardwright.compiler.support.files import write_atomic
from shardwright.orchestrator.cache.entry import read_bounded

_FILE = "tally.json"
_MAX_BYTES = 2**16
_WAIT_S = 2.0
"""Our choice: a writer holds the lock for a millisecond; counts are not worth a longer wait."""


class Tally:
    """Hits and misses of this process that are not yet in the file."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self._new = Counter[str]()

    def count(self, kind: str, hit: bool) -> None:
        """Note one look-up."""
        self._new[f"{kind} {'hits' if hit else 'misses'}"] += 1

    def save(self) -> None:
        """Add what is new to the file; a directory that refuses keeps its old counts."""
        if not self._new:
            return
        try:
            with FileLock(self._path.with_suffix(".lock"), timeout=_WAIT_S):
                total = Counter(self.read()) + self._new
                write_atomic(self._path, json.dumps(total, indent=1, sort_keys=True).encode())
        except (OSError, Timeout):
            return
        self._new.clear()

    def read(self) -> dict[str, int]:
        """The counts in the file, by `<kind> hits` and `<kind> misses`; a damaged file has none."""
        try:
            found = json.loads(read_bounded(self._path, _MAX_BYTES))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {k: n for k, n in found.items() if isinstance(n, int) and n >= 0}
