"""Hosts that share a bucket and no disk: a host is a process, or a cache, with a directory of its
own. The service is moto's, on a port of this host."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cache import Cache, bucket
from shardwright.orchestrator.cache.bucket import Bucket
from shardwright.orchestrator.cache.leases import Leases
from shardwright.orchestrator.cache.remote import S3Store
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from tests.support.scripted_units import leaving_a_file, scripted, unit

ROOT = Path(__file__).resolve().parents[2]
KEY, OBJECT = "ab" * 32, f"compile/ab/{'ab' * 32}"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of this test."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = "b" + "".join(c for c in tmp_path.name.lower() if c.isalnum())[-40:]
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    for row in client.list_objects_v2(Bucket=name).get("Contents", ()):
        client.delete_object(Bucket=name, Key=row["Key"])
    return f"s3://{name}/some/prefix"


def host(folder: Path, url: str) -> Cache:
    return Cache(folder, shared=S3Store(url))


def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service of clients that are made from now on is away."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(bucket, "_ATTEMPTS", 1)


def test_what_one_host_stored_another_has_and_keeps(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host(tmp_path / "a", url).put("compile", KEY, b"payload")
    other = host(tmp_path / "b", url)
    assert other.get("compile", KEY) == b"payload" and not other.warnings
    away(monkeypatch)
    assert host(tmp_path / "b", url).get("compile", KEY) == b"payload"


def test_what_is_stored_here_alone_is_on_no_other_host(tmp_path: Path, url: str) -> None:
    """A failure may be this host's own."""
    own = host(tmp_path / "a", url)
    assert own.put("failed", KEY, b"why", here=True) and own.get("failed", KEY) == b"why"
    assert host(tmp_path / "b", url).get("failed", KEY) is None


def test_a_question_to_the_directory_alone_is_not_answered_by_the_bucket(
    tmp_path: Path, url: str
) -> None:
    """Until somebody has asked for both, which copies the entry."""
    host(tmp_path / "a", url).put("failed", KEY, b"why")
    other = host(tmp_path / "b", url)
    assert other.get("failed", KEY, here=True) is None
    assert not other.path("failed", KEY).exists()
    assert other.get("failed", KEY) == b"why"
    assert other.get("failed", KEY, here=True) == b"why"


def test_the_first_writer_wins(tmp_path: Path, url: str) -> None:
    host(tmp_path / "a", url).put("compile", KEY, b"first")
    late = host(tmp_path / "b", url)
    assert late.put("compile", KEY, b"second") and not late.warnings
    assert host(tmp_path / "c", url).get("compile", KEY) == b"first"


class Old:
    """A service that knows no conditions."""

    def __init__(self, client: Any, code: str) -> None:
        self._client, self._code = client, code

    def __getattr__(self, name: str) -> Any:
        def request(**given: Any) -> Any:
            if "IfNoneMatch" in given or "IfMatch" in given:
                raise ClientError({"Error": {"Code": self._code}}, name)
            return getattr(self._client, name)(**given)

        return request


@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument"])
def test_a_service_without_conditional_puts_is_a_store_without_locks(
    tmp_path: Path, url: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "_client", Old(boto3.client("s3"), code))
    first, second = host(tmp_path / "a", url), host(tmp_path / "b", url)
    assert first.put("compile", KEY, b"first") and second.put("compile", KEY, b"second")
    assert host(tmp_path / "c", url).get("compile", KEY) == b"first"
    releases = [first.claim("compile", KEY), second.claim("compile", KEY)]
    assert None not in releases and not first.warnings and not second.warnings


def test_an_outage_is_told_once_and_units_are_computed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away(monkeypatch)
    units = [unit(f"u{n}", leaving_a_file(tmp_path, f"u{n}", b"x")) for n in range(4)]
    cache = host(tmp_path / "a", url)
    with scripted(tmp_path), UnitService(InlineExecutor, cache) as service:
        assert len(service.run(units)) == 4
        texts = [finding.message for finding in service.findings]
    assert [("cannot be read" in t, "cannot be written" in t) for t in texts] == [
        (True, False),
        (False, True),
    ]
    assert all(url in text for text in texts)
    again = Cache(tmp_path / "a")
    assert all(again.get(u.kind, u.key) == b"x" for u in units)


def test_an_outage_in_the_middle_costs_sharing_only(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = host(tmp_path / "a", url)
    cache.put("compile", KEY, b"shared")
    away(monkeypatch)
    cache.stores[1]._bucket.__dict__.pop("_client")
    assert cache.put("compile", "1" * 64, b"here")
    assert (cache.get("compile", KEY), cache.get("compile", "1" * 64)) == (b"shared", b"here")
    assert len(cache.warnings) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign"])
def test_a_damaged_object_is_replaced(tmp_path: Path, url: str, damage: str) -> None:
    host(tmp_path / "a", url).put("compile", KEY, b"payload")
    client, name = boto3.client("s3"), url.split("/")[2]
    key = f"some/prefix/{OBJECT}"
    data = bytearray(client.get_object(Bucket=name, Key=key)["Body"].read())
    data[-2] ^= 1
    bad = {"flip": bytes(data), "cut": bytes(data[:30]), "foreign": b"<html>"}[damage]
    client.put_object(Bucket=name, Key=key, Body=bad)
    other = host(tmp_path / "b", url)
    assert other.get("compile", KEY) is None and "damaged" in other.warnings[0]
    other.put("compile", KEY, b"payload")
    assert host(tmp_path / "c", url).get("compile", KEY) == b"payload"


def test_an_object_of_absurd_size_is_not_read(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(tmp_path / "a", url).put("compile", KEY, bytes(5000))
    monkeypatch.setattr(bucket, "MAX_ENTRY_BYTES", 1000)
    other = host(tmp_path / "b", url)
    assert other.get("compile", KEY) is None
    assert "at most 1000" in other.warnings[0]


def test_foreign_objects_are_no_entries(tmp_path: Path, url: str) -> None:
    cache = host(tmp_path, url)
    cache.put("compile", KEY, b"payload")
    client, name = boto3.client("s3"), url.split("/")[2]
    for key in ("notes", "compile/ab/short", f"../x/ab/{KEY}", f"{OBJECT}.lock"):
        client.put_object(Bucket=name, Key=f"some/prefix/{key}", Body=b"x")
    assert [entry.name.key for entry in cache.stores[1].entries()] == [KEY]


def test_a_lease_keeps_other_hosts_away_until_it_is_given_back(tmp_path: Path, url: str) -> None:
    first, second = host(tmp_path / "a", url), host(tmp_path / "b", url)
    release = first.claim("compile", KEY)
    assert release is not None and second.claim("compile", KEY) is None
    release()
    again = second.claim("compile", KEY)
    assert again is not None
    again()
    assert not list(Bucket(url).list())


def test_the_lease_of_a_dead_host_goes_to_one_other(url: str) -> None:
    assert Leases(Bucket(url)).take("k.lock") is not None
    stale = Bucket(url).get("k.lock")
    assert stale is not None
    time.sleep(1.6)  # answers are dated to the second
    heir = Leases(Bucket(url), lease_s=0.5).take("k.lock")
    assert heir is not None
    assert Bucket(url).put("k.lock", b"late", replacing=stale.tag) == ""  # who saw the same one
    heir()
    assert Bucket(url).get("k.lock") is None


def test_a_lease_is_renewed_while_it_is_held(url: str) -> None:
    release = Leases(Bucket(url), lease_s=0.15).take("k.lock")
    assert release is not None
    (first,) = Bucket(url).list()
    until = time.monotonic() + 20
    while (row := next(Bucket(url).list())).modified_s <= first.modified_s:
        assert time.monotonic() < until
        time.sleep(0.2)
    release()
    assert row.key == "k.lock" and not list(Bucket(url).list())


RACE = """
import sys
from pathlib import Path
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.cache.remote import S3Store
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from tests.support.scripted_units import leaving_a_file, unit
done, own, url = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
units = [unit(f"u{n}", leaving_a_file(done, f"u{n}", b"%d" % n, 0.1)) for n in range(10)]
with UnitService(InlineExecutor, Cache(own, shared=S3Store(url))) as service:
    results = service.run(units)
    print(sorted(results.values()) == sorted(b"%d" % n for n in range(10)), service.findings)
"""


def test_two_hosts_share_the_units_of_one_job(tmp_path: Path, url: str) -> None:
    done = tmp_path / "done"
    done.mkdir()
    with scripted(tmp_path):
        jobs = [
            subprocess.Popen(
                [sys.executable, "-c", RACE, str(done), str(tmp_path / own), url],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            for own in ("a", "b")
        ]
        assert [job.communicate(timeout=100)[0].strip() for job in jobs] == ["True []"] * 2
    ran = sorted(path.name.partition("-")[0] for path in done.iterdir())
    assert ran == sorted(f"u{n}" for n in range(10))


def test_a_batch_asks_for_many_units_at_a_time(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request per unit that is there, and its own disk alone the next time."""
    units = [unit(f"u{n}", leaving_a_file(tmp_path, f"u{n}", b"x")) for n in range(5)]
    for one in units:
        host(tmp_path / "a", url).put(one.kind, one.key, b"x")
    asked: list[tuple[str, str]] = []
    get = Bucket.get

    def counted(self: Bucket, key: str) -> object:
        asked.append((key, threading.current_thread().name))
        return get(self, key)

    monkeypatch.setattr(Bucket, "get", counted)
    for requests in (5, 0):
        with UnitService(InlineExecutor, host(tmp_path / "b", url)) as service:
            assert len(service.run(units)) == 5
            assert {row.cache for row in service.rows} == {"hit"}
        assert len(asked) == requests
        assert threading.current_thread().name not in {name for _, name in asked}
        asked.clear()


def test_without_boto3_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[s3\]'"):
        S3Store("s3://bucket")


def test_what_is_asked_anew_replaces_what_the_bucket_has(tmp_path: Path, url: str) -> None:
    """Where else the first writer wins."""
    host(tmp_path / "a", url).put("compile", KEY, b"old")
    fresh = Cache(tmp_path / "b", shared=S3Store(url), since_s=time.time())
    assert fresh.get("compile", KEY) is None
    fresh.put("compile", KEY, b"new")
    assert host(tmp_path / "c", url).get("compile", KEY) == b"new"
