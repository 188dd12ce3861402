"""Every verb that can answer from the store says so, with the age and the command that asks anew;
`--fresh` asks anew, and what it finds is what is stored from then on."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.orchestrator import api, cli
from shardwright.orchestrator.cache import About, Cache, open_cache
from shardwright.orchestrator.cache.entry import EntryName, pack_entry
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import JobConfig, asked_now, from_store, load
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.page.page import report_page
from shardwright.orchestrator.report.tried import FITS
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.service.unit_errors import UnitFailedError
from shardwright.orchestrator.submission.together import counts_of
from shardwright.orchestrator.terminal import age
from shardwright.orchestrator.validation import predict, validate, validate_screen
from shardwright.orchestrator.whatif.journal import Journal
from shardwright.orchestrator.whatif.rows import Row
from shardwright.orchestrator.whatif.sweep import Swept
from tests.support.scripted_units import answer, refusal, scripted, unit
from tests.support.small_job import write_job

KEY = "ab" * 32
HOUR = 3600.0


# The store


def aged(cache: Cache, kind: str, payload: bytes, hours: float) -> None:
    """An entry that was stored so long ago."""
    name, about = EntryName(kind, KEY), About(stored_s=time.time() - hours * HOUR)
    cache.local.write(name, pack_entry(name, payload, about))


def test_an_entry_knows_when_it_was_stored_whenever_it_was_used(tmp_path: Path) -> None:
    cache, before = Cache(tmp_path), time.time()
    cache.put("compile", KEY, b"x")
    for _ in range(2):
        found = cache.find("compile", KEY)
        assert found is not None and before <= found.about.stored_s <= time.time()


@pytest.mark.parametrize("hours", [1.0, -1.0])
def test_what_is_older_than_the_question_is_absent_and_gone(hours: float, tmp_path: Path) -> None:
    """A time to come is that of another host's clock, and says nothing."""
    aged(Cache(tmp_path), "compile", b"old", hours)
    fresh = Cache(tmp_path, since_s=time.time())
    assert fresh.get("compile", KEY) is None
    assert Cache(tmp_path).get("compile", KEY) is None
    fresh.put("compile", KEY, b"new")
    assert fresh.get("compile", KEY) == Cache(tmp_path).get("compile", KEY) == b"new"


def test_a_job_that_asks_anew_takes_what_it_has_stored_itself() -> None:
    job = load(None, ["cache.fresh=true"])
    assert 0 < job.cache.since_s <= time.time() and load(None).cache.since_s == 0
    assert asked_now(job).cache.since_s >= job.cache.since_s
    assert "since_s" not in job.as_dict()["cache"] and job.as_dict()["cache"]["fresh"] is True
    assert job == asked_now(job), "jobs of one command share a service"


# Units


@pytest.fixture
def units(tmp_path: Path) -> Iterator[Path]:
    with scripted(tmp_path):
        yield tmp_path / "cache"


def ask(cache: Cache, script: str) -> UnitService:
    service = UnitService(InlineExecutor, cache)
    service.settle([unit("one", script)])
    return service


def test_a_stored_unit_says_since_when(units: Path) -> None:
    assert ask(Cache(units), answer(b"x")).rows[0].stored_s == 0
    before = time.time()
    again = ask(Cache(units), answer(b"x"))
    assert 0 < again.rows[0].stored_s < before
    counted = counts_of(again.rows)
    assert counted.stored_s == again.rows[0].stored_s
    told = counted.stored_text("shardwright run --fresh job.toml")
    assert re.fullmatch(
        r"the unit is stored, \d+ s old; ask anew: shardwright run --fresh job.toml", told
    )
    fresh = ask(Cache(units, since_s=time.time()), answer(b"x"))
    assert (fresh.rows[0].cache, fresh.rows[0].stored_s) == ("miss", 0)
    assert counts_of(fresh.rows).stored_text("") == ""


def test_a_stored_refusal_says_so_and_a_fresh_question_is_asked_again(
    units: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hint(cache: Cache) -> str:
        with UnitService(InlineExecutor, cache) as service, pytest.raises(UnitFailedError) as no:
            service.run([unit("one", refusal("SW_TEST"))])
        return no.value.error.diagnostic.hint

    assert hint(Cache(units)) == "no"
    asked: Any = SimpleNamespace(
        id="A", model="a", workload=SimpleNamespace(layout="dp", cores=2), unsupported=lambda: ""
    )

    def predicted(*_: object) -> None:
        with UnitService(InlineExecutor, Cache(units)) as service:
            try:
                service.run([unit("one", refusal("SW_TEST"))])
            except UnitFailedError as failed:
                raise failed.error from failed

    monkeypatch.setattr(validate, "predict", predicted)
    row = validate._told(asked, None, Progress("quiet"))
    assert isinstance(row, validate.Refused)
    assert re.search(r" \(a stored refusal, \d+ \w+ old\)$", row.reason)
    assert re.fullmatch(
        r"no; this refusal is a stored one, \d+ \w+ old: --fresh \(cache.fresh\) asks anew",
        hint(Cache(units)),
    )
    assert hint(Cache(units, since_s=time.time())) == "no"


# Verbs


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def test_every_verb_that_may_answer_from_the_store_has_the_flag() -> None:
    """Those that take a job, and those that look answers up by themselves."""
    found = verbs(cli._parser())
    flags = {name: set(parser._option_string_actions) for name, parser in found.items()}
    asking = {name for name, own in flags.items() if "--set" in own and "--model" in own}
    assert {"run", "plan", "sweep", "scale", "submit"} <= asking
    for name in asking | {"compare", "validate", "parallel-compile"}:
        assert age.FLAG in flags[name], name


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job whose plan is stored."""
    folder = tmp_path_factory.mktemp("planned")
    job = write_job(folder, cache={"dir": str(folder / "cache")}, run={"progress": "quiet"})
    assert main(["plan", str(job), "--json"]) == 0
    return job


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.matrix
def test_the_screen_of_a_stored_plan(
    planned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(planned.parent)
    before = shown(["plan", "job.toml"], capsys)
    told = r"stored the answer is stored, \d+ \w+ old; ask anew: shardwright plan --fresh job.toml"
    assert re.search(told, before)
    report = json.loads(shown(["plan", "job.toml", "--json"], capsys))["provenance"]
    assert 0 < report["stored_s"] < time.time()
    cache = open_cache(load(planned, []).cache)
    counts = cache.tally.read()
    assert counts["plan hits"] >= 2, "every command adds its own to the store"
    assert report["again"] == "shardwright plan --fresh job.toml --json"
    fresh = json.loads(shown(["plan", "--fresh", "job.toml", "--json"], capsys))
    assert "stored_s" not in fresh["provenance"]
    assert {row["cache"] for row in fresh["units"]} == {"miss"}
    after = json.loads(shown(["plan", "job.toml", "--json"], capsys))["provenance"]
    assert after["stored_s"] > report["stored_s"], "the new answer is the stored one"


def test_a_comparison_says_which_plans_are_stored(
    planned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = str(planned)
    words = ["compare", job, job]
    assert "1 of 2 plans is stored" in shown(words, capsys)  # B's, which is A with what fits it
    assert "2 of 2 plans are stored, the oldest" in shown(words, capsys)
    asked: list[bool] = []
    plan = plan_cache.plan

    def noted(job: JobConfig) -> dict[str, Any]:
        asked.append(job.cache.fresh)
        return plan(from_store(job))

    monkeypatch.setattr(plan_cache, "plan", noted)
    shown([*words, "--fresh"], capsys)
    assert asked == [True, True]


def test_explaining_the_store_does_not_ask_anew(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = shown(["cache", "explain", str(planned), "--fresh"], capsys)
    assert re.search(r"plan .* hit", told)


def test_a_question_from_python_is_asked_anew_each_time(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, asked = api.job(planned, cache__fresh=True), []

    def noted(job: JobConfig, **_: object) -> dict[str, Any]:
        asked.append(job.cache.since_s)
        return {"provenance": {}}

    monkeypatch.setattr(plan_cache, "plan", noted)
    monkeypatch.setattr(plan_cache, "exit_code", lambda _: 0)
    for _ in range(2):
        api.plan(job)
    assert job.cache.since_s < asked[0] < asked[1]


# Screens


def report_of(stored_s: float, *units: float) -> dict[str, Any]:
    rows = [{"cache": "hit" if one else "miss", "stored_s": one} for one in units]
    return {"provenance": {"stored_s": stored_s} if stored_s else {}, "units": rows}


def test_a_page_says_when_its_answer_was_stored(planned: Path) -> None:
    report = api.plan(planned).data
    dated = {**report["provenance"], "stored_s": 1.7e9}
    page = report_page({**report, "provenance": dated})
    assert "2023-11-14 22:13 UTC" in page
    del dated["stored_s"]
    assert (
        "stored" not in report_page({**report, "provenance": dated}).partition("Provenance</h2>")[2]
    )


def test_lines_of_screens() -> None:
    now = time.time()
    answer_line = sections.laid(sections.stored(report_of(now - 3.5 * HOUR, now - HOUR)), 200)
    assert [line.plain for line in answer_line] == [
        "stored     the answer is stored, 3 h old; ask anew: the same with --fresh"
    ]
    made = report_of(0.0, now - 50 * HOUR, now - HOUR, 0.0)
    assert [line.plain for line in sections.laid(sections.stored_units(made), 200)] == [
        "stored     2 of 3 partition, compile and timing tasks are stored, the oldest 2 d old; ask"
        " anew: the same with --fresh"
    ]
    full = report_of(now - 3.5 * HOUR) | {
        "mesh": {"dp": 2},
        "graph": {"name": "n" * 90},
        "job": {"strategy": {"name": "fsdp"}},
    }
    (line,) = sections.headline(full, 80)
    assert line.plain.endswith("─ stored, 3 h old: --fresh asks anew") and len(line) == 80
    assert not sections.laid(sections.stored(made), 80) and not sections.laid(
        sections.stored_units(report_of(0.0, 0.0)), 80
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s old"), (59.9, "59 s old"), (60, "1 min old"), (7199, "1 h old"), (90000, "1 d old")],
)
def test_ages_in_words(seconds: float, text: str) -> None:
    assert age.age_text(1e9 - seconds, 1e9) == text


def test_the_command_that_asks_anew() -> None:
    words = ["parallel-compile", "python", "a b.py", "--fresh"]
    assert age.again(words) == "shardwright parallel-compile --fresh python 'a b.py'"


def test_rows_of_a_sweep_are_asked_anew(tmp_path: Path) -> None:
    now = time.time()
    journal = Journal(tmp_path / "points.jsonl")
    for key, hours in (("old", 2.0), ("new", -0.001)):
        journal.add(Row(key, {"a": key}, FITS, stored_s=now - hours * HOUR))
    assert set(journal.read()) == {"old", "new"} and set(journal.read(now)) == {"new"}
    rows = [*journal.read().values(), Row("now", {}, FITS)]
    told = Swept(rows=rows, known=2, began_s=now).stored_text("shardwright sweep --fresh")
    assert told == ("1 of 3 points is stored, 2 h old; ask anew: shardwright sweep --fresh")


def test_predictions_that_are_stored_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = b'{"seconds": 1.0, "shares": {}, "busy": {}}'
    aged(Cache(tmp_path), predict.KIND, payload, 30.0)
    service = UnitService(InlineExecutor, Cache(tmp_path))
    predictor = predict.Predictor(service, Cache(tmp_path))
    assert predictor._stored(KEY) is not None
    assert [round((time.time() - at) / HOUR) for at in predictor.stored_s] == [30]
    fresh = predict.Predictor(service, Cache(tmp_path, since_s=time.time()))
    assert fresh._stored(KEY) is None and not fresh.stored_s

    report = {"rows": [], "stored": 2, "predictions": 3, "stored_s": time.time() - 30 * HOUR}
    validate_screen.show({"training": report}, "shardwright validate --fresh")
    told = " ".join(capsys.readouterr().out.split())
    assert told.endswith(
        "2 of 3 predictions are stored, the oldest 1 d old; ask anew: shardwright validate --fresh"
    )
    monkeypatch.setattr(validate, "run", lambda asked: int(asked.fresh))
    assert main(["validate", "--training", "x", "--fresh"]) == 1
