"""The store: identity, damage is a miss, a bad disk costs the entry only, one computation per
key."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import CompileError, UsageError
from shardwright.orchestrator.cache import About, Cache
from shardwright.orchestrator.cache.entry import EntryName, pack_entry, read_about, unpack_entry
from shardwright.orchestrator.cache.local import LocalStore
from shardwright.orchestrator.cache.location import locate
from shardwright.orchestrator.service import executor as executor_module
from shardwright.orchestrator.service.executor import InlineExecutor, WorkUnit
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.service.unit_errors import UnitFailedError

ROOT = Path(__file__).resolve().parents[2]
KEY = "ab" * 32
NAME = EntryName("compile", KEY)


def test_an_entry_comes_back(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.get("compile", KEY) is None
    cache.put("compile", KEY, b"payload")
    assert cache.get("compile", KEY) == b"payload"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_entry_is_set_aside_and_missed(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path)
    cache.put("compile", KEY, b"payload" * 10)
    path = cache.path("compile", KEY)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[:20]), "empty": b""}[damage])
    assert cache.get("compile", KEY) is None
    assert cache.warnings and path.with_suffix(".corrupt").exists()
    cache.put("compile", KEY, b"again")
    assert cache.get("compile", KEY) == b"again"


def key(number: int) -> str:
    return f"{number:064x}"


def test_what_is_known_of_an_entry_is_beside_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    about = About("layer#1", {"function": "f" * 64, "option optlevel": "2"})
    cache.put("compile", KEY, b"payload", about)
    found = read_about(cache.path("compile", KEY))
    assert found is not None and replace(found, stored_s=0.0) == about


@pytest.mark.parametrize("at", range(0, 90, 7))
def test_any_flipped_bit_is_found(at: int) -> None:
    data = bytearray(pack_entry(NAME, b"payload" * 5, About("name", {"part": "value"})))
    data[at % len(data)] ^= 16
    assert unpack_entry(bytes(data)) is None


def test_the_entry_of_another_key_is_no_answer(tmp_path: Path) -> None:
    """A sound file under a wrong name: copied, renamed, or put there by somebody."""
    cache = Cache(tmp_path)
    cache.put("compile", KEY, b"payload")
    for kind, wrong in (("compile", key(1)), ("partition", KEY)):
        path = cache.path(kind, wrong)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cache.path("compile", KEY).read_bytes())
        assert cache.get(kind, wrong) is None
    assert len(cache.warnings) == 2 and cache.get("compile", KEY) == b"payload"


@pytest.mark.parametrize("length", [2**32 - 1, 2**16 + 1, 10**6])
def test_a_description_longer_than_allowed_is_no_entry(length: int) -> None:
    rest = length.to_bytes(4, "little") + b"\x80"
    data = b"SWCACHE2" + hashlib.sha256(rest).digest() + rest
    assert unpack_entry(data) is None


def test_a_link_a_pipe_and_a_file_of_absurd_size_are_no_entries(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(pack_entry(NAME, b"payload"))
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to(elsewhere), sparse)):
        path = cache.path("compile", key(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        fresh = Cache(tmp_path / "cache")
        assert fresh.get("compile", key(number)) is None
        assert len(fresh.warnings) == 1 and "cannot be read" in fresh.warnings[0]


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_costs_entries_not_the_job_and_is_told_once(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, counted: list[bytes]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("shardwright.orchestrator.cache.local.write_atomic", refuse)
    units = [unit(b"a1"), unit(b"b2"), unit(b"c3")]
    with UnitService(InlineExecutor, Cache(tmp_path)) as service:
        assert set(service.run(units).values()) == {b"1a", b"2b", b"3c"}
        (finding,) = service.findings
    assert (finding.code, finding.severity) == ("SW_CACHE", "warning")
    assert os.strerror(number) in finding.message
    cache = Cache(tmp_path)
    assert [cache.put("compile", key(1), b"a") for _ in range(2)] == [False, False]
    monkeypatch.undo()
    assert Cache(tmp_path).put("compile", key(1), b"a") is True


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    """Opening a lock's file cuts it short: somebody who may write to a cache must not choose which
    file of ours that is. The job goes on without the lock."""
    other = tmp_path / "other"
    other.write_text("precious")
    cache = Cache(tmp_path / "cache")
    cache.put("compile", KEY, b"payload")
    cache.path("compile", KEY).with_suffix(".lock").symlink_to(other)
    (tmp_path / "cache" / "tally.lock").symlink_to(other)
    release = cache.claim("compile", KEY)
    assert release is not None and len(cache.warnings) == 1
    release()
    cache.tally.count("compile", hit=True)
    cache.tally.save()
    assert other.read_text() == "precious"


def test_a_file_in_place_of_the_directory_is_told_once(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    cache = Cache(blocked)
    assert not cache.put("compile", KEY, b"payload")
    release = cache.claim("compile", KEY)
    assert release is not None and cache.get("compile", KEY) is None
    release()
    assert len(cache.warnings) == 1


FULL = """
import os, resource, signal, sys
from pathlib import Path
from shardwright.orchestrator.cache import Cache
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cache = Cache(Path(sys.argv[1]))
cache.put("compile", "1" * 64, b"x" * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
stored = [cache.put("compile", f"{n}" * 64, b"x" * 10000) for n in range(2, 5)]
print(stored, cache.get("compile", "1" * 64) == b"x" * 100, len(cache.warnings))
print([p.name for p in Path(sys.argv[1]).rglob(".*")])
"""


def test_a_write_the_kernel_cuts_short_leaves_nothing(tmp_path: Path) -> None:
    """The limit on file sizes makes a real write fail in the middle."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["[False, False, False] True 1", "[]"], done.stderr


def test_a_full_disk_keeps_what_it_has(tmp_path: Path) -> None:
    """A real one of a megabyte, where we may mount it."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        cache = Cache(tmp_path)
        stored = [cache.put("compile", key(n), bytes(100_000)) for n in range(20)]
        assert 5 < sum(stored) < 12
        assert len(cache.warnings) == 1 and "No space left" in cache.warnings[0]
        assert [cache.get("compile", key(n)) is not None for n in range(20)] == stored
        assert not [p for p in tmp_path.rglob(".*") if p.is_file()]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def aged(store: LocalStore, number: int, seconds: float) -> None:
    path = store.path(EntryName("compile", key(number)))
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def present(store: LocalStore) -> set[int]:
    return {int(entry.name.key, 16) for entry in store.entries()}


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, max_bytes=1000)
    for number in range(9):
        store.write(EntryName("compile", key(number)), bytes(100))
        aged(store, number, 100 - number)
    assert store.read(EntryName("compile", key(0))) is not None  # used now
    for number in (10, 11, 12):
        store.write(EntryName("compile", key(number)), bytes(100))
    left = present(store)
    assert {0, 10, 11, 12} <= left and not {1, 2} & left
    assert sum(entry.size for entry in store.entries()) <= 1000


def test_a_locked_entry_is_never_evicted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, max_bytes=1000)
    for number in range(9):
        store.write(EntryName("compile", key(number)), bytes(100))
        aged(store, number, 100 - number)
    release = store.lock(EntryName("compile", key(0)))
    assert release is not None
    for number in range(10, 30):
        store.write(EntryName("compile", key(number)), bytes(100))
    assert 0 in present(store) and 1 not in present(store)
    release()


def test_an_entry_beyond_the_bound_is_not_stored_and_costs_no_other(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    assert cache.put("compile", key(1), bytes(100))
    assert not cache.put("compile", key(2), bytes(5000))
    assert "cache.max_gib" in cache.warnings[0]
    assert cache.get("compile", key(1)) is not None


def test_leftovers_of_dead_writers_go_and_foreign_files_stay(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, max_bytes=1000)
    store.write(EntryName("compile", key(1)), bytes(100))
    folder = store.path(EntryName("compile", key(1))).parent
    stale, young, foreign = (
        folder / n for n in (f".{key(2)}.{'a' * 32}", f".{key(3)}.{'b' * 32}", "notes")
    )
    for file in (stale, young, foreign):
        file.write_bytes(bytes(300))
    for file in (stale, foreign):
        os.utime(file, (0, 0))
    for number in range(4, 12):
        store.write(EntryName("compile", key(number)), bytes(100))
    assert (stale.exists(), young.exists(), foreign.exists()) == (False, True, True)


def test_clearing_locks_leaves_those_that_are_held(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, max_bytes=0)
    for number in range(4):
        release = store.lock(EntryName("compile", key(number)))
        assert release is not None
        if number:
            release()
        else:
            held = release
    assert store.clear_locks() == (3, 1)
    assert store.lock(EntryName("compile", key(0))) is None
    held()
    assert store.clear_locks() == (1, 0)


def test_one_claim_at_a_time(tmp_path: Path) -> None:
    first = Cache(tmp_path).claim("compile", KEY)
    assert first is not None
    assert Cache(tmp_path).claim("compile", KEY) is None
    assert Cache(tmp_path).claim("partition", KEY) is not None
    first()
    assert Cache(tmp_path).claim("compile", KEY) is not None


def place(configured: str = "", **environ: str) -> tuple[str, str]:
    found = locate(configured, environ={"HOME": "/root", **environ})
    return found.url or str(found.directory), found.reason


def test_the_place_is_the_first_that_is_named() -> None:
    variables = {"XDG_CACHE_HOME": "/xdg"}
    assert place(**variables) == ("/xdg/shardwright", "default")
    variables["NEURON_COMPILE_CACHE_URL"] = "file:///var/cache/neuron"
    assert place(**variables) == ("/var/cache/neuron", "NEURON_COMPILE_CACHE_URL")
    variables["NEURON_COMPILE_CACHE_URL"] = "file:///var/my%20cache"
    assert place(**variables)[0] == "/var/my cache"
    variables["NEURON_CC_FLAGS"] = "--model-type transformer --cache_dir=/a --cache-dir /flags"
    assert place(**variables) == ("/flags", "--cache_dir of NEURON_CC_FLAGS")
    assert place("/mine", **variables) == ("/mine", "cache.dir")


def test_a_relative_place_is_refused_where_it_would_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {"NEURON_CC_FLAGS": "--cache_dir units"}
    assert place(**flags) == ("units", "--cache_dir of NEURON_CC_FLAGS")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(UsageError, match="SW_RELATIVE_OUTPUT"):
        place(**flags)
    with pytest.raises(UsageError, match="SW_RELATIVE_OUTPUT"):
        place("file:units")
    assert place("s3://bucket")[0] == "s3://bucket"


def test_a_shared_store_has_a_directory_in_front() -> None:
    found = locate("s3://bucket/some/prefix/", environ={"XDG_CACHE_HOME": "/xdg"})
    assert (found.url, found.directory) == ("s3://bucket/some/prefix", Path("/xdg/shardwright"))
    assert locate("s3://bucket", "/mine").directory == Path("/mine")


@pytest.mark.parametrize(
    "text",
    [
        "http://host/cache",
        "file://host/cache",
        "s3://",
        "s3://b/p?x=1",
        "s3://id:key@b/p",
        "https://id:key@host/cache",
        "https://host/cache?X-Amz-Signature=key@",
    ],
)
def test_other_urls_are_refused_without_their_secrets(text: str) -> None:
    with pytest.raises(UsageError, match="SW_CACHE_URL") as caught:
        locate("", environ={"NEURON_COMPILE_CACHE_URL": text})
    assert "NEURON_COMPILE_CACHE_URL" in str(caught.value) and "key@" not in str(caught.value)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Replace the unit functions by one that records its payloads and fails on b"bad"."""
    seen: list[bytes] = []

    def run(_: str, payload: bytes) -> bytes:
        seen.append(payload)
        if payload == b"bad":
            raise CompileError("SW_TEST", "refused")
        return payload[::-1]

    monkeypatch.setattr(executor_module, "run_unit", run)
    return seen


def unit(payload: bytes) -> WorkUnit:
    return WorkUnit("compile", payload.hex().ljust(64, "0"), "u", payload)


def test_equal_units_run_once_and_a_second_service_runs_none(
    tmp_path: Path, counted: list[bytes]
) -> None:
    units = [unit(b"a1"), unit(b"b2"), unit(b"a1")]
    with UnitService(InlineExecutor, Cache(tmp_path)) as service:
        first = service.run(units)
        assert [row.cache for row in service.rows] == ["miss", "miss"]
    assert sorted(counted) == [b"a1", b"b2"]
    with UnitService(InlineExecutor, Cache(tmp_path)) as service:
        assert service.run(units) == first
        assert [row.cache for row in service.rows] == ["hit", "hit"]
    assert len(counted) == 2


def test_a_failing_unit_raises_after_the_others_are_stored(
    tmp_path: Path, counted: list[bytes]
) -> None:
    with UnitService(InlineExecutor, Cache(tmp_path)) as service:
        with pytest.raises(UnitFailedError) as caught:
            service.run([unit(b"a1"), unit(b"bad"), unit(b"z9")])
        assert (caught.value.unit, caught.value.error.code) == (unit(b"bad"), "SW_TEST")
        assert service.run([unit(b"a1"), unit(b"z9")]) is not None
    assert sorted(counted) == [b"a1", b"bad", b"z9"]
    assert Cache(tmp_path).get("compile", unit(b"bad").key) is None
