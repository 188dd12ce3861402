"""An entry: a payload under a checksum, and what was known about it when it was stored.

    magic   8 bytes
    sha256  of everything after it
    length  of the description, 4 bytes, little-endian
    description  msgpack {entry, name, parts, stored_s}: which entry this is, a name for people,
                 the parts of the key, as text, and when it was stored (Unix time)
    payload

Entries are read from places that others can write to. Sizes are bounded before memory is taken,
nothing is used before its checksum is right, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from shardwright.compiler.support.files import read_regular

GIB = 2**30
MAX_ENTRY_BYTES = 4 * GIB
"""Our choice: results of units are kilobytes to some megabytes; what is larger is no entry."""
MAX_ABOUT_BYTES, MAX_NAME = 2**16, 256
_MAGIC = b"SWCACHE2"
_HEAD_BYTES = len(_MAGIC) + 32 + 4
_LAST_S = 1e11  # our choice: the year 5138; later is no time at which something was stored
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _-]*")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class EntryName:
    """What an entry is found by: what kind of result, and the digest of what it depends on."""

    kind: str
    key: str

    def __post_init__(self) -> None:
        # Names become paths.
        assert self.is_name(self.kind, self.key), (self.kind, self.key)

    def __str__(self) -> str:
        return f"{self.kind}/{self.key}"

    @staticmethod
    def is_name(kind: str, key: str) -> bool:
        """Whether these can be the two halves of a name."""
        return bool(_KIND.fullmatch(kind) and _KEY.fullmatch(key))


@dataclass(frozen=True, slots=True)
class About:
    """What an entry is called, the parts its key was made of, so that a miss can be explained, and
    when it was stored (Unix time; 0: not known)."""

    name: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    stored_s: float = 0.0


NOTHING_KNOWN = About()


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry whose checksum was right."""

    about: About
    payload: bytes


def pack_entry(entry: EntryName, payload: bytes, about: About = NOTHING_KNOWN) -> bytes:
    """The bytes of an entry."""
    fields: dict[str, Any] = {
        "entry": str(entry),
        "name": about.name[:MAX_NAME],
        "parts": dict(about.parts),
        "stored_s": about.stored_s,
    }
    described: bytes = msgpack.packb(fields)
    if len(described) > MAX_ABOUT_BYTES:
        described = msgpack.packb(fields | {"parts": {}})
    rest = len(described).to_bytes(4, "little") + described + payload
    return _MAGIC + hashlib.sha256(rest).digest() + rest


def unpack_entry(data: bytes, entry: EntryName | None = None) -> Entry | None:
    """What the bytes of an entry hold; None when they are damaged, no entry, or another one than
    `entry`."""
    digest = data[len(_MAGIC) : len(_MAGIC) + 32]
    if hashlib.sha256(memoryview(data)[len(_MAGIC) + 32 :]).digest() != digest:
        return None
    found = _described(data)
    if found is None or (entry is not None and found[0] != str(entry)):
        return None
    return Entry(found[1], data[_HEAD_BYTES + _about_bytes(data) :])


def _described(data: bytes) -> tuple[str, About] | None:
    """Which entry this says it is, and its description, unchecked."""
    size = _about_bytes(data)
    if not data.startswith(_MAGIC) or size > min(MAX_ABOUT_BYTES, len(data)):
        return None
    try:
        found = msgpack.unpackb(data[_HEAD_BYTES : _HEAD_BYTES + size])
        parts = {str(k): str(v) for k, v in found["parts"].items()}
        stored_s = _time(found.get("stored_s"))
        return str(found["entry"]), About(str(found["name"]), parts, stored_s)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException):
        return None


def _time(value: object) -> float:
    """A Unix time; 0 for what is none."""
    return float(value) if type(value) is float and 0 <= value < _LAST_S else 0.0


def read_bounded(path: Path, most: int = MAX_ENTRY_BYTES) -> bytes:
    """The bytes of a file of the cache. Raises OSError, also for a link, a pipe, a device, and a
    file of more than `most` bytes."""
    return read_regular(path, most, links=False)


def read_about(path: Path) -> About | None:
    """The description of the entry in a file, unchecked: good enough to be shown. Raises
    OSError."""
    head = read_regular(path, MAX_ENTRY_BYTES, first=_HEAD_BYTES + MAX_ABOUT_BYTES, links=False)
    found = _described(head)
    return found[1] if found else None


def _about_bytes(data: bytes) -> int:
    return int.from_bytes(data[_HEAD_BYTES - 4 : _HEAD_BYTES], "little")
