"""Entries of the cache byte by byte, what a full directory gives up, bounds of what is read.

An entry: 8 bytes of magic, 32 of sha256, 4 of length, the description, the payload.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.support.files import inflated, read_regular, write_atomic
from shardwright.orchestrator.cache import local
from shardwright.orchestrator.cache.cache import Cache
from shardwright.orchestrator.cache.entry import (
    About,
    EntryName,
    pack_entry,
    read_about,
    read_bounded,
    unpack_entry,
)
from shardwright.orchestrator.cache.local import LocalStore, is_leftover
from shardwright.orchestrator.cache.store import StoreError
from shardwright.sim_cluster.timing.timing_unit import _trace

NAME = EntryName("compile", "0123456789abcdef" * 4)
OTHER = EntryName("compile", "f" * 64)
ABOUT = About("layer", {"target": "trn1n", "a": "1"}, 2.5)


def entry(description: Any, payload: bytes = b"data") -> bytes:
    """An entry with this description, its checksum right."""
    described = description if isinstance(description, bytes) else msgpack.packb(description)
    return headed(len(described).to_bytes(4, "little") + described + payload)


def headed(rest: bytes) -> bytes:
    """Any bytes behind the magic and their own checksum."""
    return b"SWCACHE2" + hashlib.sha256(rest).digest() + rest


FIELDS = {
    "entry": str(NAME),
    "name": "layer",
    "parts": {"target": "trn1n", "a": "1"},
    "stored_s": 2.5,
}


def test_an_entry_byte_by_byte() -> None:
    data = pack_entry(NAME, b"data", ABOUT)
    assert data == entry(FIELDS)
    found = unpack_entry(data, NAME)
    assert found is not None and (found.about, found.payload) == (ABOUT, b"data")
    assert unpack_entry(data) == found and unpack_entry(data, OTHER) is None
    assert str(NAME) == f"compile/{'0123456789abcdef' * 4}"


@pytest.mark.parametrize("time", [None, 1, -1.0, 1e300, "1.0", True, float("nan")])
def test_a_time_that_is_none_is_not_known(time: object) -> None:
    """Which is how entries of before times were kept read, too."""
    fields = {name: value for name, value in FIELDS.items() if name != "stored_s"}
    found = unpack_entry(entry(fields if time is None else {**fields, "stored_s": time}))
    assert found is not None and found.about == replace(ABOUT, stored_s=0.0)


def test_times_end_with_the_eleventh_digit() -> None:
    """1e11 s is the year 5138; a second before is a time, the second itself is none."""
    for given, known in ((1e11 - 1, 1e11 - 1), (1e11, 0.0), (1e11 + 1, 0.0)):
        found = unpack_entry(entry({**FIELDS, "stored_s": given}))
        assert found is not None and found.about.stored_s == known


def test_names_are_cut_and_parts_that_are_too_long_left_out() -> None:
    """256 letters of a name; 64 KiB of description."""
    found = unpack_entry(pack_entry(NAME, b"", About("n" * 300)))
    assert found is not None and found.about.name == "n" * 256
    room = (
        65_536
        - len(msgpack.packb({"entry": str(NAME), "name": "", "parts": {"a": ""}, "stored_s": 0.0}))
        - 2
    )
    for size, parts in ((room, 1), (room + 1, 0)):
        about = unpack_entry(pack_entry(NAME, b"", About("", {"a": "x" * size})))
        assert about is not None and len(about.about.parts) == parts


@pytest.mark.parametrize(
    "data",
    [
        b"",
        entry(FIELDS)[:43],
        headed(b""),
        headed(b"\0\0\0"),
        headed(b"\0\0\0\0"),
        headed(b"\5\0\0\0"),
        b"SWCACHE1" + entry(FIELDS)[8:],
        entry(FIELDS) + b"x",
        entry(b""),
        entry(b"\xc1"),  # no msgpack
        entry([1]),
        entry({"entry": str(NAME), "name": "n"}),
        entry({"entry": str(NAME), "parts": {}}),
        entry({"name": "n", "parts": {}}),
        entry({"entry": str(NAME), "name": "n", "parts": [1]}),
        entry({"entry": str(NAME), "name": "n" * 70_000, "parts": {}}),
    ],
)
def test_what_is_no_entry(data: bytes) -> None:
    assert unpack_entry(data) is None


@pytest.mark.parametrize(
    ("kind", "key", "good"),
    [
        ("time", "a" * 64, True),
        ("a-b_c 9", "0" * 64, True),
        ("", "a" * 64, False),
        ("-a", "a" * 64, False),
        ("a/b", "a" * 64, False),
        ("time", "a" * 63, False),
        ("time", "A" * 64, False),
        ("time", "a" * 65, False),
    ],
)
def test_names_that_become_paths(kind: str, key: str, good: bool) -> None:
    assert EntryName.is_name(kind, key) is good
    if not good:
        with pytest.raises(AssertionError):
            EntryName(kind, key)


def test_the_description_alone_is_read_from_the_head(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    path.write_bytes(pack_entry(NAME, b"x" * 200_000, ABOUT))
    assert read_about(path) == ABOUT
    path.write_bytes(b"no entry")
    assert read_about(path) is None
    assert read_bounded(path, 8) == b"no entry"
    with pytest.raises(OSError, match="has 8 bytes, at most 7 are read"):
        read_bounded(path, 7)


def test_the_largest_entry_is_of_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    with path.open("wb") as file:
        file.truncate(2**32 + 1)  # no block of it is written
    with pytest.raises(OSError, match="at most 4294967296 are read"):
        read_bounded(path)


# The directory


def store(path: Path, most: int) -> LocalStore:
    return LocalStore(path, most)


def names(count: int) -> list[EntryName]:
    return [EntryName("time", f"{n:064x}") for n in range(count)]


def fill(given: LocalStore, count: int, size: int, first: int = 0) -> None:
    """Entries used at seconds 1000, 1001, ..."""
    for n, name in list(enumerate(names(count)))[first:]:
        given.write(name, bytes(size))
        os.utime(given.path(name), (1000 + n, 1000 + n))


def held(given: LocalStore, count: int) -> list[int]:
    return [n for n, name in enumerate(names(count)) if given.path(name).exists()]


def test_a_full_directory_gives_up_the_oldest_and_a_tenth_more(tmp_path: Path) -> None:
    """Of 1000 bytes ten entries of 100 are all; the next needs 100, and 100 stay free: two go."""
    given = store(tmp_path, 1000)
    fill(given, 10, 100)
    assert held(given, 10) == list(range(10))
    fill(given, 11, 100, first=10)
    assert held(given, 11) == list(range(2, 11))
    fill(given, 12, 100, first=11)
    assert held(given, 12) == list(range(2, 12))


def test_what_is_free_is_not_freed_again(tmp_path: Path) -> None:
    """Of 1000 bytes ten entries of 95 leave 50. The next needs 100, and 100 stay free: 150 are
    missing, and two entries are 190; all 200 would take a third."""
    given = store(tmp_path, 1000)
    fill(given, 10, 95)
    fill(given, 11, 100, first=10)
    assert held(given, 11) == list(range(2, 11))


def test_locks_that_are_older_make_no_room(tmp_path: Path) -> None:
    """Of 4 bytes one is wanted by a second entry, two locks lie before the first one, and stay."""
    given = store(tmp_path, 4)
    fill(given, 1, 4)
    for name in names(3)[1:]:
        release = given.lock(name)
        assert release is not None
        release()
    for lock in tmp_path.rglob("*.lock"):
        os.utime(lock, (1, 1))
    fill(given, 2, 1, first=1)
    assert held(given, 2) == [1] and len(list(tmp_path.rglob("*.lock"))) == 2


def test_a_bound_of_nothing_is_none_and_an_entry_may_fill_it(tmp_path: Path) -> None:
    given = store(tmp_path / "a", 0)
    fill(given, 3, 1000)
    assert held(given, 3) == [0, 1, 2]
    given = store(tmp_path / "b", 1000)
    given.write(NAME, bytes(1000))
    with pytest.raises(StoreError, match=r"cache\.max_gib requires 9\.32e-07 for one entry"):
        given.write(OTHER, bytes(1001))
    assert given.path(NAME).exists()


def test_what_others_write_is_seen_after_a_sixteenth_of_the_bound(tmp_path: Path) -> None:
    """1600 bytes: after 100 of our own, not before, the directory is listed again, and 1501 of
    another process leave no room beside them."""
    ours = store(tmp_path, 1600)
    fill(ours, 1, 50)
    (tmp_path / "time" / "ff").mkdir(parents=True)
    other = tmp_path / "time" / "ff" / ("f" * 64)
    other.write_bytes(bytes(1501))
    os.utime(other, (1, 1))
    fill(ours, 2, 50, first=1)
    assert other.exists()
    fill(ours, 3, 14, first=2)
    assert not other.exists() and held(ours, 3) == [0, 1, 2]


def test_where_an_entry_lies_and_that_reading_is_a_use(tmp_path: Path) -> None:
    given = store(tmp_path, 0)
    given.write(NAME, b"data")
    assert given.path(NAME) == tmp_path / "compile" / "01" / NAME.key
    os.utime(given.path(NAME), (5, 5))
    before = time.time()
    assert given.read(NAME) == b"data"
    (file,) = given.files()
    assert (file.name, file.suffix, file.size) == (NAME, "", 4) and file.used_s >= before - 1
    assert given.read(OTHER) is None
    given.set_aside(NAME)
    assert given.read(NAME) is None and list(given.entries()) == []
    assert [f.suffix for f in given.files()] == [".corrupt"]
    given.set_aside(NAME)  # once more is no error


def test_files_that_are_ours(tmp_path: Path) -> None:
    folder = tmp_path / "compile" / "01"
    folder.mkdir(parents=True)
    key = NAME.key
    ours = [key, f"{key}.lock", f"{key}.corrupt", f".{key}.{'0' * 32}"]
    for name in (*ours, f"{key}.txt", f"{key}0", "note", f".{key}.{'0' * 31}"):
        (folder / name).write_bytes(b"12")
    (folder / ("b" * 64)).mkdir()
    (folder / ("c" * 64)).symlink_to(folder / key)
    (tmp_path / "a link").symlink_to(tmp_path / "compile")
    found = {file.path.name: (file.name, file.suffix) for file in store(tmp_path, 0).files()}
    assert found == {
        ours[0]: (NAME, ""),
        ours[1]: (NAME, ".lock"),
        ours[2]: (NAME, ".corrupt"),
        ours[3]: (None, ""),
    }
    assert [s.name for s in store(tmp_path, 0).entries()] == [NAME]


@pytest.mark.parametrize(("age_s", "is_old"), [(3590, False), (3610, True)])
def test_temporary_files_are_left_behind_after_an_hour(
    tmp_path: Path, age_s: int, is_old: bool
) -> None:
    given = store(tmp_path, 0)
    folder = tmp_path / "compile" / "01"
    folder.mkdir(parents=True)
    path = folder / f".{NAME.key}.{'0' * 32}"
    path.write_bytes(b"")
    os.utime(path, (time.time() - age_s,) * 2)
    (file,) = given.files()
    assert is_leftover(file) is is_old
    assert given.discard(file) is is_old
    assert path.exists() is not is_old
    assert local.LOCK == ".lock" and not is_leftover(local.File(path, NAME, "", 0, 0.0))


def test_locks(tmp_path: Path) -> None:
    """One at a time; an entry that is locked is not removed; removing one takes its lock along."""
    given = store(tmp_path, 0)
    given.write(NAME, b"data")
    release = given.lock(NAME)
    assert release is not None and given.lock(NAME) is None
    assert not given.remove(NAME) and given.path(NAME).exists()
    assert given.clear_locks() == (0, 1)
    release()
    assert given.clear_locks() == (1, 0) and given.clear_locks() == (0, 0)
    assert given.remove(NAME) and not list(given.files())


def test_what_another_process_removes_meanwhile_is_gone(tmp_path: Path) -> None:
    """The entry, its lock, what was set aside, and what a process that died has left."""
    given = store(tmp_path, 0)
    given.write(NAME, b"data")
    given.set_aside(NAME)
    (aside,) = given.files()
    left = tmp_path / "compile" / "01" / f".{NAME.key}.{'0' * 32}"
    left.write_bytes(b"")
    os.utime(left, (1, 1))
    leftover = next(file for file in given.files() if file.name is None)
    for file in (aside, leftover):
        file.path.unlink()
        assert given.discard(file)
    assert given.remove(NAME) and not list(given.files())
    assert given.remove(OTHER)  # whose folder was never there


def test_a_cache_of_one_directory(tmp_path: Path) -> None:
    """10 GiB unless told otherwise; it asks every 0.05 s for a lock that another holds."""
    cache = Cache(tmp_path)
    assert cache.local._max_bytes == 10_737_418_240
    assert (cache.poll_s, cache.stores) == (0.05, (cache.local,))
    assert cache.path("time", "a" * 64) == tmp_path / "time" / "aa" / ("a" * 64)
    assert cache.put("time", "a" * 64, b"x") and cache.get("time", "a" * 64) == b"x"
    assert cache.bring([("time", "b" * 64)]) == []  # there is no other store
    cache.set_aside("time", "a" * 64)
    assert cache.get("time", "a" * 64) is None
    place = f"cache entry time/{'a' * 64} of {tmp_path} is damaged; it is computed again"
    assert cache.warnings == [place]


# Files


def test_files_are_regular_and_bounded(tmp_path: Path) -> None:
    path, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    path.write_bytes(b"12345")
    link.symlink_to(path)
    os.mkfifo(pipe)
    assert read_regular(path, 5) == b"12345" and read_regular(link, 5) == b"12345"
    assert read_regular(path, 1, first=3) == b"123"
    with pytest.raises(OSError, match="has 5 bytes, at most 4"):
        read_regular(path, 4)
    with pytest.raises(OSError):
        read_regular(link, 5, links=False)
    with pytest.raises(OSError, match="no regular file"):
        read_regular(pipe, 5)


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, str]] = []

    def sync(file: int) -> None:
        about = os.fstat(file)
        synced.append((about.st_size, "") if stat.S_ISREG(about.st_mode) else (0, "folder"))

    monkeypatch.setattr(os, "fsync", sync)
    path = tmp_path / "a" / "b"
    write_atomic(path, b"one")
    assert path.read_bytes() == b"one" and synced == []
    write_atomic(path, b"two", lasting=True)
    assert path.read_bytes() == b"two"
    assert synced == [(3, ""), (0, "folder")]  # when all of the file is there
    data: Any = "text"
    with pytest.raises(TypeError):
        write_atomic(path, data)
    assert path.read_bytes() == b"two" and os.listdir(path.parent) == ["b"]


def frame(size: int) -> bytes:
    """The beginning of a frame that says it holds `size` bytes."""
    made = zstandard.ZstdCompressor().compressobj(size=size)
    return made.compress(b"a") + made.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


def test_a_frame_says_its_size_and_it_is_bounded() -> None:
    whole = zstandard.compress(b"12345")
    assert inflated(whole, 5) == b"12345"
    with pytest.raises(ValueError, match="5 bytes in a frame, at most 4 are read"):
        inflated(whole, 4)
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(b"12345")
    with pytest.raises(ValueError, match="-1 bytes in a frame"):
        inflated(unsaid, 5)
    with pytest.raises(ValueError):
        inflated(b"no frame", 5)


def test_a_stored_trace_has_at_most_1_gib() -> None:
    with pytest.raises(LoadError, match="at most 1073741824 are read"):
        _trace(frame(2**30 + 1))
    with pytest.raises(LoadError) as refused:
        _trace(frame(5))
    assert "at most" not in str(refused.value)
    assert _trace(zstandard.compress(b"trace")) == b"trace"
