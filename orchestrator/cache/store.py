"""What a place for entries can do, and what it says when it cannot.

A store keeps bytes under names and judges none of them: `cache.py` packs, checks and combines.
`local.py` is a directory, `remote.py` a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from shardwright.orchestrator.cache.entry import EntryName

Release = Callable[[], None]
"""Gives a lock back."""


def nothing() -> None:
    """The `Release` of what cannot be locked."""


class StoreError(Exception):
    """The place cannot be read or written now; the message names the cause, not the entry."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry as a store lists it. `used_s` is when it was last used (Unix time), where the store
    knows no uses when it was stored."""

    name: EntryName
    size: int
    used_s: float


class Store(Protocol):
    """A place for entries. All methods raise StoreError when the place fails."""

    place: str  # for people
    is_asked_again: bool  # after trouble; what takes seconds to fail is not
    poll_s: float  # how often to ask for a lock that another holds

    def read(self, name: EntryName) -> bytes | None:
        """The bytes under a name, None when there are none."""

    def write(self, name: EntryName, data: bytes) -> None:
        """Keep bytes under a name: all of them or none, whatever happens."""

    def lock(self, name: EntryName) -> Release | None:
        """Take the name's lock without waiting; None while another holds it."""

    def set_aside(self, name: EntryName) -> None:
        """Have damaged bytes out of the way of good ones."""

    def remove(self, name: EntryName) -> bool:
        """Whether an entry that nobody is working on was removed."""

    def entries(self) -> Iterator[Stored]:
        """Every entry, in no order."""
