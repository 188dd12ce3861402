"""What people ask of a cache that exists: what is in it, whether it is sound, and to be rid of some
of it. Plain data; `commands.py` prints it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.orchestrator.cache.entry import EntryName, read_about, read_bounded, unpack_entry
from shardwright.orchestrator.cache.local import CORRUPT, LOCK, LocalStore, is_leftover
from shardwright.orchestrator.cache.store import Store, Stored, StoreError
from shardwright.orchestrator.cache.tally import Tally


@dataclass(frozen=True, slots=True)
class Row:
    """An entry in a list; the name is empty where only its bytes would tell it."""

    kind: str
    key: str
    name: str
    bytes: int
    used_s: float


@dataclass(frozen=True, slots=True)
class KindRow:
    """All entries of a kind, and how often it was asked for one."""

    kind: str
    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that is no sound entry: what it is, and whether it was removed."""

    name: str
    what: str
    removed: bool


def listed(store: Store, kind: str = "") -> list[Row]:
    """Entries, the last used first."""
    found = [_row(store, item) for item in store.entries() if kind in ("", item.name.kind)]
    return sorted(found, key=lambda row: (-row.used_s, row.kind, row.key))


def _row(store: Store, item: Stored) -> Row:
    name = ""
    if isinstance(store, LocalStore):
        try:
            about = read_about(store.path(item.name))
        except OSError:  # gone, or no file of ours: `verify` says so
            about = None
        name = about.name if about else "?"
    return Row(item.name.kind, item.name.key, name, item.size, item.used_s)


def totals(store: Store, tally: Tally | None) -> list[KindRow]:
    """Entries and bytes per kind, with the counts of `tally`."""
    counts = tally.read() if tally else {}
    kinds: dict[str, list[int]] = {count.rpartition(" ")[0]: [] for count in counts}
    for item in store.entries():
        kinds.setdefault(item.name.kind, []).append(item.size)
    return [
        KindRow(
            kind,
            len(sizes),
            sum(sizes),
            counts.get(f"{kind} hits", 0),
            counts.get(f"{kind} misses", 0),
        )
        for kind, sizes in sorted(kinds.items())
    ]


def faults(store: Store, repair: bool) -> Iterator[Fault]:
    """Everything that is not sound; with `repair` it is removed. Raises StoreError."""
    for item in list(store.entries()):
        what = _trouble(store, item.name)
        if what:
            yield Fault(str(item.name), what, repair and store.remove(item.name))
    if not isinstance(store, LocalStore):
        return
    for file in list(store.files()):
        if file.suffix == CORRUPT or is_leftover(file):
            what = "damaged, set aside by a job" if file.suffix else "left by a writer that died"
            yield Fault(file.path.name, what, repair and store.discard(file))


def _trouble(store: Store, name: EntryName) -> str:
    """What is wrong with an entry; it is not marked as used."""
    try:
        data = read_bounded(store.path(name)) if isinstance(store, LocalStore) else store.read(name)
    except FileNotFoundError:
        return ""
    except (OSError, StoreError) as error:
        return str(error)
    return "damaged" if data is not None and unpack_entry(data, name) is None else ""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What was removed, and how many entries were left because a job works on them."""

    entries: int = 0
    bytes: int = 0
    in_use: int = 0


def cleaned(store: Store, kind: str, older_than_s: float, dry_run: bool) -> Cleaned:
    """Remove the entries of a kind (empty: of all) that were not used for so long. Raises
    StoreError."""
    before = time.time() - older_than_s
    removed = num_bytes = in_use = 0
    for item in list(store.entries()):
        if kind not in ("", item.name.kind) or item.used_s > before:
            continue
        if dry_run or store.remove(item.name):
            removed, num_bytes = removed + 1, num_bytes + item.size
        else:
            in_use += 1
    return Cleaned(removed, num_bytes, in_use)


def locks(store: LocalStore) -> int:
    """How many files of locks there are."""
    return sum(file.suffix == LOCK for file in store.files())
