"""Jobs under faults: twenty killed workers, a lost node, two jobs killed and racing on one cache,
an interrupt on Ray. All end with the bytes of the calm run.

Only processes whose ids came from our own units and jobs are killed. Short forms of the same faults
are in `test_executors.py` and `test_service.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.service.executor import Executor, WorkUnit
from shardwright.orchestrator.service.process_backend import ProcessExecutor
from shardwright.orchestrator.service.ray_backend import RayExecutor
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.service.worker_pool import MAX_ATTEMPTS
from tests.support.interrupts import heard_by_children
from tests.support.scripted_units import answer, is_running, scripted, unit
from tests.support.small_job import write_job

pytestmark = pytest.mark.matrix
KILLS, UNITS = 20, 60


@pytest.fixture(autouse=True)
def scripts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Scripted units, except where whole jobs run."""
    if "whole_jobs" in request.node.name:
        yield
        return
    with scripted(tmp_path):
        yield


def noting_units(folder: Path) -> list[WorkUnit]:
    """Units that say on which worker they run while they run."""
    notes = [f'echo $worker > {folder}/{n}; sleep 0.3; rm "{folder}/{n}"' for n in range(UNITS)]
    return [unit(f"u{n}", answer(b"%d" % n, note)) for n, note in enumerate(notes)]


def kill_workers(folder: Path, killed: list[str], over: threading.Event) -> None:
    """Kill the worker of a random running unit, again and again. A unit that lost three workers
    would rightly be given up, so no unit is hit more than twice."""
    choose = random.Random(7)
    while len(killed) < KILLS and not over.is_set():
        time.sleep(0.4)
        notes = [p for p in folder.iterdir() if killed.count(p.name) < MAX_ATTEMPTS - 1]
        running = {p.name: p.read_text().strip() for p in notes if p.exists()}
        alive = [n for n, pid in running.items() if pid and is_running(int(pid))]
        name = choose.choice(sorted(alive)) if alive else ""
        if name and (folder / name).exists():  # else its worker may have gone on to another unit
            killed.append(name)
            os.kill(int(running[name]), signal.SIGKILL)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: ProcessExecutor(3), id="process"),
        pytest.param(
            lambda: RayExecutor(3), id="ray", marks=(pytest.mark.ray, pytest.mark.exhaustive)
        ),
    ],
)
def test_twenty_killed_workers_lose_nothing(make: Callable[[], Executor], tmp_path: Path) -> None:
    folder = tmp_path / "running"
    folder.mkdir()
    units, over = noting_units(folder), threading.Event()
    killed: list[str] = []
    killer = threading.Thread(target=kill_workers, args=(folder, killed, over))
    with UnitService(make, Cache(tmp_path / "cache")) as service:
        killer.start()
        try:
            results = service.run(units)
        finally:
            over.set()
            killer.join()
    assert results == {u.key: b"%d" % n for n, u in enumerate(units)}
    assert len(killed) == KILLS
    assert sum(row.attempts - 1 for row in service.rows) >= KILLS // 2


@pytest.mark.ray
def test_a_lost_node_costs_its_units_only(tmp_path: Path) -> None:
    """Three nodes, one lost in the middle; more actors than CPUs are refused before; the workers'
    code came over the network; metrics count what was computed."""
    command = [sys.executable, "-m", "tests.support.cluster_job", str(tmp_path)]
    told = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    assert told["lost"] == 1
    assert told["results"] == [str(n) for n in range(30)]
    assert max(told["attempts"]) <= 2
    assert told["workers"] == ["ray-0", "ray-1", "ray-2"]
    assert "SW_RAY_RESOURCES" in told["refusal"]
    assert told["where"] and all("/py_modules" in text for text in told["where"])
    assert told["metrics"]["ray_shardwright_units_computed_total"] == 31


_JOB = """
import sys
from pathlib import Path
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.service.process_backend import ProcessExecutor
from shardwright.orchestrator.service.worker_pool import MAX_ATTEMPTS
from shardwright.orchestrator.service.service import UnitService
from tests.support.scripted_units import leaving_a_file, unit

folder = Path(sys.argv[1])
units = [unit(f"u{n}", leaving_a_file(folder / "ends", f"u{n}", b"%d" % n, 0.2)) for n in range(24)]
with UnitService(lambda: ProcessExecutor(2), Cache(folder / "cache")) as service:
    results = service.run(units)
    computed = sum(row.cache == "miss" for row in service.rows)
    print(computed, *[results[u.key].decode() for u in units])
"""


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _JOB, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_racing_jobs_compute_each_unit_once_and_survive_each_other(tmp_path: Path) -> None:
    """Two jobs on one cache; then again with one of them killed: the other takes over."""
    for kill in (False, True):
        folder = tmp_path / str(kill)
        (folder / "ends").mkdir(parents=True)
        jobs = [start(folder) for _ in range(2)]
        if kill:
            while len(list((folder / "ends").iterdir())) < 6:
                time.sleep(0.05)
            jobs.pop().kill()
        told = [job.communicate(timeout=120)[0].split() for job in jobs]
        assert all(words[1:] == [str(n) for n in range(24)] for words in told)
        if not kill:
            assert sum(int(words[0]) for words in told) == 24
            assert len(list((folder / "ends").iterdir())) == 24


def plans(folder: Path, number: int) -> subprocess.Popen[str]:
    """A whole `plan` on the cache of `folder`, with an event log and a report of its own."""
    flags = f"--executor process --workers 2 --json --events {folder}/events-{number}".split()
    command = [sys.executable, "-m", "shardwright", "plan", str(folder / "job.toml"), *flags]
    return subprocess.Popen(command, stdout=(folder / f"report-{number}").open("w"), text=True)


def computed(folder: Path) -> list[str]:
    """Keys of units that were computed, over all event logs."""
    lines = [line for log in folder.glob("events-*") for line in log.read_text().splitlines()]
    events = map(json.loads, lines)
    return sorted(event["key"] for event in events if event["event"] == "unit.done")


def answered(folder: Path, number: int) -> dict[str, object]:
    report = json.loads((folder / f"report-{number}").read_text())
    return {key: report[key] for key in ("programs", "memory", "timing", "collectives")}


def test_whole_jobs_race_and_are_killed_and_answer_alike(tmp_path: Path) -> None:
    """Three commands: a calm one; two at the same time; one that is killed in the middle and then
    repeated."""
    folders = {name: tmp_path / name for name in ("calm", "race", "killed")}
    for folder in folders.values():
        folder.mkdir()
        write_job(folder, cache={"dir": str(folder / "cache")})
    assert plans(folders["calm"], 0).wait(120) == 0
    calm = computed(folders["calm"])
    assert len(calm) == len(set(calm)) >= 6

    racing = [plans(folders["race"], number) for number in range(2)]
    assert [job.wait(120) for job in racing] == [0, 0]
    assert computed(folders["race"]) == calm

    job = plans(folders["killed"], 0)
    while len(found := computed_so_far(folders["killed"])) < 3:
        assert job.poll() is None, found
        time.sleep(0.05)
    job.kill()
    job.wait()
    assert plans(folders["killed"], 1).wait(120) == 0
    assert computed(folders["killed"]) == calm

    expected = answered(folders["calm"], 0)
    others = [(folders["race"], 0), (folders["race"], 1), (folders["killed"], 1)]
    assert all(answered(folder, number) == expected for folder, number in others)


def computed_so_far(folder: Path) -> list[str]:
    return computed(folder) if (folder / "events-0").exists() else []


_LONG_JOB = """
import sys
from pathlib import Path
from shardwright.orchestrator import cli
from shardwright.orchestrator.service.flight import fly
from shardwright.orchestrator.service.ray_backend import RayExecutor
from tests.support.scripted_units import Listed, answer, unit

def forever(_):
    executor = RayExecutor(2)
    try:
        units = [unit(str(n), answer(b"", "sleep 0.1")) for n in range(100_000)]
        for number, outcome in enumerate(fly(lambda: executor, Listed(units))):
            if number < 4:
                print(outcome.worker.partition(":")[2], flush=True)
    finally:
        executor.close()

cli._plan = forever
sys.exit(cli.main(["plan"]))
"""


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_job_on_ray(number: int) -> None:
    with heard_by_children():
        job = subprocess.Popen(
            [sys.executable, "-c", _LONG_JOB],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    assert job.stdout is not None
    pids = {int(job.stdout.readline()) for _ in range(4)}
    assert all(map(is_running, pids))
    begin = time.monotonic()
    job.send_signal(number)
    try:
        assert job.wait(timeout=30) == 130
        print(f"ended after {time.monotonic() - begin:.1f} s")
    finally:
        job.kill()
        job.stdout.close()
    assert not any(map(is_running, pids))
