"""The unit service: refusals are results, crashes are not, failures can be run again alone, events
and counts tell what happens, and jobs that share a cache share the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.cache.entry import EntryName, pack_entry
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.report import explanations
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.units import executor_of
from shardwright.orchestrator.service import progress as progress_module
from shardwright.orchestrator.service.batch import Batch, Counts, UnitRow
from shardwright.orchestrator.service.events import EventLog
from shardwright.orchestrator.service.executor import Executor, InlineExecutor, Outcome, WorkUnit
from shardwright.orchestrator.service.flight import Source, fly
from shardwright.orchestrator.service.process_backend import ProcessExecutor
from shardwright.orchestrator.service.progress import Progress, counts_text
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.service.unit_errors import (
    FAILED,
    UnitDefectError,
    UnitFailedError,
    refusal_kind,
    stored_at,
)
from shardwright.orchestrator.service.units import PACKAGES, digest, source_digest
from tests.support.scripted_units import answer, killing, leaving_a_file, refusal, scripted, unit


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path) -> Iterator[None]:
    with scripted(tmp_path):
        yield


def service(
    tmp_path: Path, executor: Callable[[], Executor] = InlineExecutor, log: str = ""
) -> UnitService:
    events = EventLog(tmp_path / log, job="j1") if log else None
    return UnitService(executor, Cache(tmp_path / "cache"), events=events)


def logged(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_refusal_is_stored_like_a_result(tmp_path: Path) -> None:
    units = [unit("refused", refusal("SW_TEST")), unit("fine", answer(b"x"))]
    codes = []
    for log in ("first", "second"):
        with service(tmp_path, log=log) as one, pytest.raises(UnitFailedError) as caught:
            one.run(units)
        assert type(caught.value.error) is ShardingError
        hint = caught.value.error.diagnostic.hint
        assert hint.startswith("no") and ("--fresh" in hint) == (log == "second")
        assert bool(stored_at(caught.value)) == (log == "second")
        codes.append([(line["event"], line.get("code")) for line in logged(tmp_path / log)])
    assert ("unit.failed", "SW_TEST") in codes[0]
    assert ("unit.hit", "SW_TEST") in codes[1]
    assert "unit.started" not in {event for event, _ in codes[1]}


SENSELESS = (
    b"",
    b"\xc1",
    msgpack.packb(7),
    msgpack.packb(["ShardingError"]),
    msgpack.packb(["SystemExit", "SW_TEST", "refused", None, ""]),
    msgpack.packb([["ShardingError"], "SW_TEST", "refused", None, ""]),
    msgpack.packb(["ShardingError", "SW_TEST", {"not": "text"}, None, ""]),
    msgpack.packb(["ShardingError", "SW_TEST", "refused", ["model.py"], ""]),
    msgpack.packb(["ShardingError", "SW_TEST", "refused", ["model.py", "41", ""], ""]),
)


@pytest.mark.parametrize("row", SENSELESS)
def test_a_stored_refusal_that_makes_no_sense_is_computed_again(tmp_path: Path, row: bytes) -> None:
    """As a damaged entry is, though its checksum is right."""
    fine = unit("fine", answer(b"x"))
    cache, kind = Cache(tmp_path / "cache"), refusal_kind(fine.kind)
    assert cache.put(kind, fine.key, row)
    with service(tmp_path) as one:
        assert one.run([fine]) == {fine.key: b"x"}
        (finding,) = one.findings
    assert finding.code == "SW_CACHE" and f"{kind}/{fine.key}" in finding.message
    assert cache.get(kind, fine.key) is None
    assert cache.path(kind, fine.key).with_suffix(".corrupt").exists()


def test_what_was_refused_is_not_kept_and_a_defect_is(tmp_path: Path) -> None:
    """Only for what is kept is there a command that runs it."""
    broken = WorkUnit("no such kind", "0" * 64, "broken", b"x")
    with service(tmp_path, log="log") as one, pytest.raises(UnitFailedError):
        one.run([unit("refused", refusal("SW_TEST")), broken])
    kept = [path for path in (tmp_path / "cache" / FAILED).rglob("*") if path.is_file()]
    assert kept == [Cache(tmp_path / "cache").path(FAILED, broken.key)]
    failed = [line for line in logged(tmp_path / "log") if line["event"] == "unit.failed"]
    commands = {line["code"]: line["reproduce"] for line in failed}
    assert commands == {"SW_TEST": "", "defect": f"shardwright unit {kept[0]}"}


class Telling(InlineExecutor):
    """Says when it is told to forget its units, and has always room for another."""

    capacity = 9

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def cancel(self) -> None:
        self.told.append("cancelled")
        super().cancel()


def test_what_is_in_flight_ends_before_its_lock_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the job is interrupted between two units, also while something else (a debugger, a
    traceback) still looks at the flight."""
    told: list[str] = []
    flights: list[Iterator[Outcome]] = []
    release = Batch.release
    monkeypatch.setattr(Batch, "release", lambda b: (told.append("released"), release(b)))

    def held(executor: Callable[[], Executor], source: Source) -> Iterator[Outcome]:
        flights.append(fly(executor, source))
        return flights[-1]

    monkeypatch.setattr("shardwright.orchestrator.service.service.fly", held)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    cache = Cache(tmp_path / "cache")
    with UnitService(lambda: Telling(told), cache, progress=interrupted) as one:
        with pytest.raises(KeyboardInterrupt):
            one.run([unit(f"u{n}", answer(b"x")) for n in range(3)])
        assert told == ["cancelled", "released"]


def test_a_crash_is_not_stored_and_can_be_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The child crashes once; the same unit is done the next time, alone or in the job."""
    flag = tmp_path / "flag"
    crash = unit("crash once", answer(b"x", f"[ -e {flag} ] || kill -9 $partitioner"))
    with service(tmp_path) as one, pytest.raises(UnitFailedError) as caught:
        one.run([crash])
    assert caught.value.error.code == "SW_PARTITIONER_CRASH"
    kept = Cache(tmp_path / "cache").path(FAILED, crash.key)
    assert f"reproduce with: shardwright unit {kept}" in str(caught.value.error)
    assert main(["unit", str(kept)]) == 70
    assert "SW_PARTITIONER_CRASH" in capsys.readouterr().err
    flag.touch()
    assert main(["unit", str(kept)]) == 0
    assert "done in" in capsys.readouterr().out
    with service(tmp_path) as one:
        assert one.run([crash]) == {crash.key: b"x"}


NO_UNIT = (
    b"something else",
    pack_entry(EntryName(FAILED, "0" * 64), msgpack.packb(["no such kind", "0" * 64, "u", b""])),
    pack_entry(EntryName(FAILED, "0" * 64), msgpack.packb(["compile", "0" * 64, "u", 10**9])),
    pack_entry(EntryName(FAILED, "0" * 64), b"\xc1"),
)


@pytest.mark.parametrize("data", NO_UNIT)
def test_a_file_that_is_no_unit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    assert main(["unit", str(file)]) == 2
    assert "SW_USAGE" in capsys.readouterr().err


def test_a_poisoned_unit_is_reported_with_its_command_and_the_others_are_kept(
    tmp_path: Path,
) -> None:
    starts = tmp_path / "starts"
    starts.mkdir()
    poison = unit("poison", killing(99, starts, b""))
    others = [unit(f"u{n}", answer(b"%d" % n)) for n in range(5)]
    with service(tmp_path, lambda: ProcessExecutor(2), "log") as one:
        with pytest.raises(UnitFailedError) as caught:
            one.run([poison, *others])
        row = next(row for row in one.rows if row.error)
    assert caught.value.unit == poison
    assert caught.value.error.code == "SW_UNIT_POISONED" == row.error
    assert "shardwright unit" in str(caught.value.error)
    cache = Cache(tmp_path / "cache")
    assert cache.get(poison.kind, poison.key) is None
    assert all(cache.get(u.kind, u.key) is not None for u in others)
    events = [line["event"] for line in logged(tmp_path / "log")]
    assert (events.count("worker.lost"), events.count("unit.retried")) == (3, 2)


def test_the_failure_of_the_first_unit_is_the_one_that_is_raised(tmp_path: Path) -> None:
    units = [unit("b", refusal("SW_B") + " # long"), unit("a", refusal("SW_A"))]
    for given in (units, units[::-1]):
        with service(tmp_path) as one, pytest.raises(UnitFailedError) as caught:
            one.run(given)
        assert caught.value.unit == given[0]
    with service(tmp_path) as one, pytest.raises(UnitDefectError, match="KeyError"):
        one.run([WorkUnit("no such kind", "0" * 64, "broken", b"x")])


def test_every_event_carries_job_and_unit(tmp_path: Path) -> None:
    units = [unit(f"u{n}", answer(b"x" * n)) for n in range(1, 4)]
    with service(tmp_path, log="log") as one:
        one.run(units)
        one.run(units[:1])
    lines = logged(tmp_path / "log")
    assert {line["job"] for line in lines} == {"j1"}
    of_units = [line for line in lines if str(line["event"]).startswith("unit.")]
    assert {line["key"] for line in of_units} == {u.key for u in units}
    done = [line for line in of_units if line["event"] == "unit.done"]
    assert sorted(line["result_bytes"] for line in done) == [1, 2, 3]
    assert all(line["seconds"] > 0 and line["worker"] for line in done)
    assert [line["left"] for line in done] == [2, 1, 0]
    assert of_units[-1]["event"] == "unit.hit"


def test_a_log_that_cannot_be_written_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with service(tmp_path, log="file/log") as one:
        assert one.run([unit("u", answer(b"x"))])
        assert [(f.code, f.severity) for f in one.findings] == [("SW_EVENTS", "warning")]
        assert "event log" in one.findings[0].message


def test_counts_and_time_left_reach_the_watcher(tmp_path: Path) -> None:
    seen: list[tuple[UnitRow, Counts]] = []
    units = [unit(f"u{n}", answer(b"x")) for n in range(4)] + [unit("bad", refusal("SW_TEST"))]
    cache = Cache(tmp_path / "cache")
    with UnitService(InlineExecutor, cache) as one:
        one.run(units[:1])
    with (
        UnitService(InlineExecutor, cache, lambda *told: seen.append(told)) as one,
        pytest.raises(UnitFailedError),
    ):
        one.run(units)
    counts = [c for _, c in seen]
    assert [c.done for c in counts] == [1, 2, 3, 4, 5]
    assert (counts[0].hits, counts[0].eta_s) == (1, None)
    assert all(c.eta_s is not None for c in counts[1:])
    assert (counts[-1].failed, counts[-1].eta_s, counts[-1].total) == (1, 0.0, 5)
    assert counts_text(counts[1]).startswith("2/5, 1 cached, ")


@pytest.mark.parametrize("form", ["plain", "json", "quiet", "bar"])
def test_progress_in_every_form(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = UnitRow("compile", "k", "layer#1", 0.0, 0.5, "process-0:7", "miss")
    bad = UnitRow("compile", "l", "layer#2", 0.0, 0.5, "process-0:7", "miss", error="SW_TEST")
    with Progress(form) as progress:
        progress.unit(row, Counts(total=2, done=1, hits=0, failed=0, eta_s=3.0))
        progress.unit(bad, Counts(total=2, done=2, hits=0, failed=1, eta_s=0.0))
    out, err = capsys.readouterr()
    assert out == ""
    if form == "json":
        first, second = map(json.loads, err.splitlines())
        assert (first["done"], first["total"], first["eta_s"]) == (1, 2, 3.0)
        assert (second["error"], second["failed"]) == ("SW_TEST", 1)
    else:
        assert ("SW_TEST" in err) == (form != "quiet")
        assert ("3 s left" in err) == (form == "plain")


def test_stages_are_said_once_when_they_begin(capsys: pytest.CaptureFixture[str]) -> None:
    """What takes a while without a unit or a step of its own."""
    with Progress("plain") as progress:
        stages = Stages(begun=progress.stage)
        with stages.timed("capture"), stages.timed("import"):
            assert "captures the step" in capsys.readouterr().err
        with stages.timed("capture"):
            pass
    assert capsys.readouterr().err == ""
    Progress("json").stage("link")
    told = json.loads(capsys.readouterr().err)
    assert (told["progress"], told["name"]) == ("stage", "link")


def test_time_left_is_that_of_items_that_took_some(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many there are is said before the first is done."""
    clock = [0.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    with Progress("plain") as progress:
        progress.begin("point", 3, 4)
        progress.item("point", "a", 1, 4, quick=True)
        clock[0] = 10.0
        progress.item("point", "b", 2, 4)
        progress.item("point", "c", 3, 4, quick=True)
        progress.item("point", "d", 4, 4)
    assert [line.split("s ", 1)[1] for line in capsys.readouterr().err.splitlines()] == [
        "point 0/4, 3 known",
        "point 1/4: a",
        "point 2/4, 20 s left: b",
        "point 3/4, 10 s left: c",
        "point 4/4: d",
    ]


@pytest.mark.parametrize("form", ["plain", "bar"])
def test_names_are_no_markup(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["layer[0]/[/b]x", "fwd[bold]x", ":smile:"]
    with Progress(form) as progress:
        for name in names:
            row = UnitRow("compile", "k", name, 0.0, 0.1, "w", "miss", error="SW_TEST")
            progress.unit(row, Counts(total=9, done=1, hits=0, failed=1, eta_s=None))
        progress.say("[/]")
    err = capsys.readouterr().err
    assert all(text in err for text in (*names, "[/]"))


def test_what_diverged_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    explanations.show((), {"numerics": {"losses": [float("nan")]}}, True, print)
    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["numerics"] == {
        "losses": [None]
    }
    Progress("json").step(0, 2, float("nan"), float("inf"))
    EventLog(tmp_path / "log")("some", seconds=float("inf"), rows=[{"loss": float("nan")}])
    texts = capsys.readouterr().err, (tmp_path / "log").read_text()
    step, event = (json.loads(text, parse_constant=refuse) for text in texts)
    assert (step["loss"], step["reference"], step["step"]) == (None, None, 1)
    assert (event["seconds"], event["rows"]) == (None, [{"loss": None}])


def test_inline_takes_no_time_limit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unit_timeout_s requires workers"):
        executor_of(load(None, ["run.executor=inline", "run.unit_timeout_s=5"]))


def race(tmp_path: Path, units: list[WorkUnit], jobs: int) -> list[UnitService]:
    """Services of one cache that run the same units at the same time."""
    services = [service(tmp_path) for _ in range(jobs)]
    answers: list[dict[str, bytes]] = []
    threads = [threading.Thread(target=lambda s=s: answers.append(s.run(units))) for s in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == jobs and all(a == answers[0] for a in answers)
    return services


@pytest.mark.parametrize("form", ["plain", "json"])
def test_who_waits_for_another_job_says_so_once(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    units = [unit(f"u{n}", answer(b"x" * n)) for n in range(6)]
    other, events = Cache(tmp_path / "cache"), EventLog(tmp_path / "log")
    held = [other.claim(one.kind, one.key) for one in units[:5]]
    assert None not in held

    def end(row: UnitRow, _: Counts) -> None:
        """The other job is done when this one has done what was left to it."""
        if row.cache == "miss":
            threading.Timer(0.3, finish).start()

    def finish() -> None:
        for one, release in zip(units[:5], held, strict=True):
            other.put(one.kind, one.key, one.payload[:1])
            assert release is not None
            release()

    progress = Progress(form)
    cache = Cache(tmp_path / "cache")
    with UnitService(InlineExecutor, cache, end, events, progress.left_to_others) as service:
        service.run(units)
        assert sum(row.cache == "miss" for row in service.rows) == 1
    (line,) = capsys.readouterr().err.splitlines()
    if form == "plain":
        assert "partition waits for another job: u4, u3, u2 and 2 more" in line
    else:
        assert len(json.loads(line)["names"]) == 5
    assert [row["event"] for row in logged(tmp_path / "log")].count("unit.waiting") == 5


def test_jobs_that_race_on_one_cache_share_the_work(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.mkdir()
    scripts = {n: leaving_a_file(starts, f"u{n}", b"%d" % n, 0.05) for n in range(12)}
    services = race(tmp_path, [unit(f"u{n}", s) for n, s in scripts.items()], jobs=2)
    assert sorted(p.name.partition("-")[0] for p in starts.iterdir()) == sorted(
        f"u{n}" for n in scripts
    )
    computed = [sum(row.cache == "miss" for row in s.rows) for s in services]
    assert sum(computed) == len(scripts)
    # Neither waits for the other while there is something to do.
    assert min(computed) >= 3


_JOB = """
import sys
from pathlib import Path
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.cache.entry import EntryName, pack_entry
from shardwright.orchestrator.service.process_backend import ProcessExecutor
from shardwright.orchestrator.service.service import UnitService
from tests.support.scripted_units import leaving_a_file, unit

folder, count = Path(sys.argv[1]), int(sys.argv[2])
units = [unit(f"u{n}", leaving_a_file(folder / "starts", f"u{n}", b"%d" % n, 0.1))
         for n in range(count)]
with UnitService(lambda: ProcessExecutor(2), Cache(folder / "cache")) as service:
    results = service.run(units)
    print(sum(row.cache == "hit" for row in service.rows), b"".join(results.values()).hex())
"""


def test_a_killed_job_is_resumed_where_it_was(tmp_path: Path) -> None:
    """kill -9 of the whole job in the middle: what was stored is not computed again."""
    (tmp_path / "starts").mkdir()
    stored = tmp_path / "cache" / "partition"
    command = [sys.executable, "-c", _JOB, str(tmp_path), "12"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not [p for p in stored.glob("??/*") if len(p.name) == 64]:
        assert job.poll() is None
        time.sleep(0.02)
    job.kill()
    job.wait()
    kept = [p for p in stored.glob("??/*") if len(p.name) == 64]
    assert 1 <= len(kept) < 12
    out = subprocess.check_output(command, text=True).split()
    assert int(out[0]) == len(kept)
    ordered = sorted(bytes.fromhex(out[1]).decode())
    assert ordered == sorted("".join(map(str, range(12))))


def test_sources_are_digested_wherever_every_package_lies(tmp_path: Path) -> None:
    """Ray unpacks every package of `py_modules` into a folder of its own."""
    root = Path(__file__).resolve().parents[2]
    path = []
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / package).symlink_to(root / package)
        path.append(str(tmp_path / package))
    code = "from shardwright.orchestrator.service.units import *; print(source_digest(PACKAGES))"
    told = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == source_digest(PACKAGES) != digest([])
