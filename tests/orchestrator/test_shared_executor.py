"""One executor for several jobs of a process: every job gets its own outcomes, a unit that several
want is computed once, the executor starts with the first unit, and giving up ends every job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import pytest

from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.service.executor import InlineExecutor, WorkUnit
from shardwright.orchestrator.service.process_backend import ProcessExecutor
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.service.shared import SharedExecutor
from tests.support.scripted_units import answer, leaving_a_file, run, scripted, unit

T = TypeVar("T")
TURN_S = 0.02


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path) -> Iterator[None]:
    with scripted(tmp_path):
        yield


def job(shared: SharedExecutor, cache: Path, units: list[WorkUnit]) -> dict[str, bytes]:
    with UnitService(shared.lease, Cache(cache)) as service:
        return service.run(units)


def turned(shared: SharedExecutor, futures: list[Future[T]]) -> list[T]:
    while wait(futures, timeout=0).not_done:
        shared.turn(TURN_S)
    return [future.result() for future in futures]


@pytest.mark.parametrize("make", [InlineExecutor, lambda: ProcessExecutor(2)])
def test_jobs_get_their_own_and_share_what_they_have_in_common(make, tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    ends.mkdir()
    common = [unit(f"c{n}", leaving_a_file(ends, f"c{n}", b"c%d" % n)) for n in range(3)]
    own = [unit(f"o{n}", leaving_a_file(ends, f"o{n}", b"o%d" % n)) for n in range(3)]
    shared = SharedExecutor(make)
    with ThreadPoolExecutor(3) as threads:
        asked = [[*common, one] for one in own]
        found = turned(shared, [threads.submit(job, shared, tmp_path / "cache", u) for u in asked])
    shared.close()
    for number, results in enumerate(found):
        expected = {u.key: b"c%d" % n for n, u in enumerate(common)}
        assert results == expected | {own[number].key: b"o%d" % number}
    assert len(list(ends.iterdir())) == 6


def test_nothing_starts_while_the_cache_knows_everything(tmp_path: Path) -> None:
    units = [unit("a", answer(b"a"))]
    with UnitService(InlineExecutor, Cache(tmp_path / "cache")) as service:
        service.run(units)
    starts: list[int] = []
    shared = SharedExecutor(lambda: starts.append(1) or InlineExecutor())
    shared.turn(0)
    assert job(shared, tmp_path / "cache", units) == {units[0].key: b"a"}
    assert not starts


def test_giving_up_ends_every_job(tmp_path: Path) -> None:
    shared = SharedExecutor(lambda: ProcessExecutor(1))
    units = [unit(f"u{n}", answer(b"x", "sleep 60")) for n in range(2)]
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(job, shared, tmp_path / "cache", [u]) for u in units]
        while not shared._waiting:
            shared.turn(TURN_S)
        shared.cancel()
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(timeout=30)
    shared.close()


def test_a_lease_takes_units_after_it_was_cancelled() -> None:
    shared, lease_done = SharedExecutor(InlineExecutor), threading.Event()
    lease = shared.lease()
    lease.submit(unit("dropped", answer(b"old")))
    lease.cancel()

    def again() -> bytes | None:
        outcomes = run(lease, [unit("kept", answer(b"new"))])
        lease_done.set()
        return outcomes[0].result

    with ThreadPoolExecutor(1) as threads:
        assert turned(shared, [threads.submit(again)]) == [b"new"]
    assert lease_done.is_set()
