"""Sweeps: points, rows, the journal, interrupts, and that a point of a sweep is answered as a plan
of its own is."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.report.tried import FITS, REFUSED, TOO_LARGE
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.service.units import digest
from shardwright.orchestrator.whatif import commands, pictures, table
from shardwright.orchestrator.whatif.journal import Journal
from shardwright.orchestrator.whatif.points import Point, points
from shardwright.orchestrator.whatif.rows import METRICS, Row, ordered, pareto
from shardwright.orchestrator.whatif.sweep import sweep
from tests.support.small_job import write_job

GRID = ("--mesh", "dp_shard=auto", "--vary", "mesh.tp=1,3", "--vary", "remat=none,full")


def settings(changes: Mapping[str, Any]) -> JobConfig:
    return load(None, ["model.preset=llama2-7b"], changes)


def asked(*varied: str, listed: Path | None = None) -> list[dict[str, str]]:
    return [dict(point.values) for point in points(varied, listed, settings)]


@pytest.mark.parametrize(("mfu", "text"), [(0.576, "57.6%"), (0.0042, "0.42%"), (None, "-")])
def test_a_table_has_two_digits_of_a_utilisation(mfu: float | None, text: str) -> None:
    assert METRICS["mfu"].text(Row("", {}, FITS, metrics={"mfu": mfu})) == text


def test_a_grid_is_the_product_of_its_keys() -> None:
    found = points(["mesh.tp=1,2", "strategy=fsdp,generic"], None, settings)
    assert [(p.job.mesh.tp, p.job.strategy.name) for p in found] == [
        (1, "fsdp"),
        (1, "generic"),
        (2, "fsdp"),
        (2, "generic"),
    ]


def test_whole_meshes_and_models_are_values_too() -> None:
    found = points(["mesh=dp_shard=32;dp_shard=4,tp=8", "model=llama2-7b"], None, settings)
    assert [(p.job.mesh.dp_shard, p.job.mesh.tp) for p in found] == [(32, 0), (4, 8)]
    assert {p.job.model.preset for p in found} == {"llama2-7b"}


def test_lists_are_csv_or_json_lines(tmp_path: Path) -> None:
    table, lines = tmp_path / "a.csv", tmp_path / "a.jsonl"
    table.write_text("mesh.tp, strategy.remat\n2, none\n4,\n")
    lines.write_text(
        '{"mesh": {"tp": 2}, "strategy.remat": "none"}\n\n{"mesh.tp": 4, "remat": null}\n'
    )
    rows = [{"mesh.tp": "2", "strategy.remat": "none"}, {"mesh.tp": "4"}]
    assert asked(listed=table) == asked(listed=lines) == rows
    crossed = asked("dtype=float32,bfloat16", listed=table)
    assert len(crossed) == 4 and crossed[1] == rows[0] | {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("varied", "said"),
    [
        ([], "--vary or --points"),
        (["mesh.tp"], "--vary requires KEY=VALUE"),
        (["mesh.tp=1", "mesh.tp=2"], "once per key"),
        (["mesh.tpp=1"], "unknown key mesh.tpp"),
        (["meshes.tp=1"], "unknown table"),
        (["tp=1"], "a job has no key 'tp'"),
        (["remat=some"], "strategy.remat requires one of"),
        (["instances=0"], "cluster.instances requires 1 to"),
        (["micro-batch=-1"], "strategy.micro_batch requires 1 to"),
        (["global-batch=-8"], "strategy.global_batch requires 0 to"),
        (["seq-len=-1"], "model.seq_len requires a whole number of tokens"),
        (["mesh=tp"], "--mesh requires axis=size"),
        (["run.steps=1"], "plans depend on, got run.steps"),
        (["executor=inline"], "plans depend on, got run.executor"),
        (["remat=none", "strategy.remat=full"], "requires one value of strategy.remat"),
        (["mesh.tp=1", "mesh=dp_shard=8"], "requires one value of mesh.tp"),
    ],
)
def test_what_is_not_understood_is_refused_before_anything_starts(
    varied: list[str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        points(varied, None, settings)


def test_machines_are_looked_up_before_the_first_point_is_planned(tmp_path: Path) -> None:
    found = points(["target=trn1.32xlarge,trn9"], None, settings)
    with pytest.raises(UsageError, match="trn9"):
        sweep(found, settings({}), Journal(tmp_path / "j"), lambda *_: None)


def test_a_bad_list_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"mesh.tp": 1}\nnonsense\n')
    with pytest.raises(UsageError, match=r"a\.jsonl:2"):
        asked(listed=path)


def test_a_value_with_commas_needs_quotes(tmp_path: Path) -> None:
    """Else `tp=8` would be a cell that nobody reads."""
    path = tmp_path / "a.csv"
    path.write_text("remat,mesh\nfull,dp_shard=4,tp=8\n")
    with pytest.raises(UsageError, match=r"a\.csv:2: requires 2 cells"):
        asked(listed=path)
    path.write_text('remat,mesh\nfull,"dp_shard=4,tp=8"\n', encoding="utf-8-sig")  # as of Excel
    assert [point.job.mesh.tp for point in points([], path, settings)] == [8]


def row(key: str, status: str = FITS, **metrics: float) -> Row:
    return Row(key, {"k": key}, status, metrics=metrics)


def test_rows_that_fit_come_first_then_by_the_objective() -> None:
    rows = [
        row("refused", REFUSED),
        row("slow", tokens_per_s=1.0),
        row("large", TOO_LARGE, tokens_per_s=9.0),
        row("fast", tokens_per_s=2.0),
    ]
    found = [r.key for r in ordered(rows, METRICS["tokens_per_s"])]
    assert found == ["fast", "slow", "large", "refused"]


def test_the_front_is_what_nothing_beats_in_both() -> None:
    pairs = {"a": (1.0, 9.0), "b": (2.0, 4.0), "beaten": (3.0, 5.0), "equal": (2.0, 4.0)}
    rows = [row(k, step_time_s=x, peak_gib=y) for k, (x, y) in pairs.items()]
    rows.append(row("large", TOO_LARGE, step_time_s=0.5, peak_gib=0.5))
    front = pareto(rows, METRICS["step_time_s"], METRICS["peak_gib"])
    assert [r.key for r in front] == ["a", "b"]


def test_a_journal_survives_what_cuts_or_damages_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "folder" / "points.jsonl")
    assert journal.read() == {}
    rows = {name: row(name, peak_gib=0.1) for name in "abc"}
    for one in rows.values():
        journal.add(one)
    assert journal.read() == rows
    path = tmp_path / "folder" / "points.jsonl"
    whole = path.read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    path.write_bytes(first + second.replace(b"0.1", b"0.2") + third[: len(third) // 2])
    assert journal.read() == {"a": rows["a"]}
    journal.add(rows["b"])  # behind the line that was cut
    assert journal.read() == {"a": rows["a"], "b": rows["b"]}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o644)])
def test_others_read_a_journal_where_the_user_lets_them(
    umask: int, mode: int, tmp_path: Path
) -> None:
    path, before = tmp_path / "points.jsonl", os.umask(umask)
    try:
        Journal(path).add(row("a"))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    "change",
    [
        {"key": 1},
        {"values": None},
        {"values": ["tp"]},
        {"values": {"tp": 8}},
        {"status": "fast"},
        {"status": ["fits"]},
        {"reason": None},
        {"metrics": 1},
        {"metrics": {"peak_gib": "0.1"}},
        {"metrics": {"peak_gib": True}},
        {"metrics": {"step_time_s": [1.0]}},
        {"metrics": {"mesh": 8}},
        {"metrics": {"cores": 10**400}},
        {"color": "red"},
    ],
)
def test_a_row_that_no_sweep_writes_counts_as_absent(
    tmp_path: Path, change: Mapping[str, Any]
) -> None:
    """Whatever its digest says; its point is planned again."""
    path = tmp_path / "points.jsonl"
    own = row("a", peak_gib=0.1).as_dict()
    for data in (own | dict(change), row("b").as_dict()):
        line = data | {"digest": digest([json.dumps(data).encode()])}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    assert list(Journal(path).read()) == ["b"]


def test_a_row_without_a_digest_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text(json.dumps(row("a").as_dict()) + "\n")
    journal = Journal(path)
    journal.add(row("b"))
    assert list(journal.read()) == ["b"]


def test_progress_says_what_a_point_came_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds where there are some; a point may also be too large before it is timed."""
    timed = row("a", TOO_LARGE, step_time_s=0.5)
    untimed = Row("b", {"tp": "8"}, TOO_LARGE, "SW_CAPACITY", "too large")
    with Progress("plain") as progress:
        for number, each in enumerate((timed, untimed), start=1):
            commands._tell(progress, each, number, 2)
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in told] == ["0.5 s", "SW_CAPACITY"]


def events(path: Path, name: str) -> list[str]:
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line["key"] for line in lines if line["event"] == name]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job and the files of a sweep over it."""
    folder = tmp_path_factory.mktemp("sweep")
    job = write_job(folder, cache={"dir": str(folder / "cache")})
    flags = ("--out", str(folder / "out"), "--events", str(folder / "events"), "--json")
    assert main(["sweep", str(job), *GRID, *flags]) == 0
    return folder


@pytest.mark.matrix
def test_a_point_is_answered_as_a_plan_of_its_own(swept: Path, tmp_path: Path) -> None:
    data = json.loads((swept / "out" / "sweep.json").read_text())
    assert [p["status"] for p in data["points"]] == [FITS, FITS, REFUSED, REFUSED]
    for point in data["points"][:2]:
        keys = {"strategy.remat": point["values"]["remat"], "mesh.dp_shard": 32}
        alone = load(swept / "job.toml", [f"cache.dir={tmp_path}", "run.executor=inline"], keys)
        report = plan_cache.plan(replace(alone, mesh=replace(alone.mesh, tp=1)))
        assert point["metrics"]["step_time_s"] == report["timing"]["step_time_s"]
        assert point["metrics"]["peak_gib"] * 2**30 == report["memory"]["peak_bytes"]
    assert data["points"][2]["code"] == "SW_MESH_PRODUCT"


@pytest.mark.matrix
def test_units_that_points_share_are_computed_once(swept: Path) -> None:
    done, hit = (events(swept / "events", name) for name in ("unit.done", "unit.hit"))
    assert len(done) == len(set(done))
    assert set(hit) & set(done)  # what one computed, the other took


def test_files_hold_every_point(swept: Path) -> None:
    with (swept / "out" / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["status"] for r in rows] == [FITS, FITS, REFUSED, REFUSED]
    assert float(rows[0]["tokens_per_s"]) > float(rows[1]["tokens_per_s"])
    frame = pandas.read_parquet(swept / "out" / "sweep.parquet")
    assert list(frame.columns) == list(rows[0]) and len(frame) == 4


def test_a_figure_that_points_set_has_one_type(tmp_path: Path) -> None:
    """A refused point has it as text alone, and a plan as a number."""
    rows = [
        Row("a", {"instances": "2"}, FITS, metrics={"instances": 2, "target": "t"}),
        Row("b", {"instances": "3"}, REFUSED, "SW_A", "why"),
    ]
    table.write_files(tmp_path, "sweep", {}, rows)
    assert list(pandas.read_parquet(tmp_path / "sweep.parquet")["instances"]) == [2, 3]


def test_pictures_show_what_fits_and_are_the_same_every_time(tmp_path: Path) -> None:
    rows = [
        Row(f"{tp}{remat}", {"mesh.tp": tp, "remat": remat}, status, metrics=figures(int(tp)))
        for tp, remat, status in (
            ("2", "none", FITS),
            ("2", "full", FITS),
            ("16", "none", TOO_LARGE),
            ("16", "full", FITS),
        )
    ]
    written = [
        pictures.write(tmp_path / name, rows, METRICS["tokens_per_s"], ["mesh.tp", "remat"])
        for name in ("first", "second")
    ]
    names = [path.name for path in written[0]]
    assert names == ["pareto.svg", "pareto.png", "heat-tp-remat.svg", "heat-tp-remat.png"]
    for one, other in zip(*written, strict=True):
        assert one.read_bytes() == other.read_bytes()
    heat = (tmp_path / "first" / "heat-tp-remat.svg").read_text()
    assert all(f"<!-- {text} -->" in heat for text in ("does not fit", "16,000", "tp", "remat"))


def figures(tp: int) -> dict[str, float]:
    return {
        "tokens_per_step": 1.0,
        "step_time_s": 1.0 / tp,
        "tokens_per_s": 1000.0 * tp,
        "usd_per_1e6_tokens": 1.0,
        "peak_gib": float(tp),
    }


def test_a_sweep_again_plans_nothing_and_its_screen_fits(
    swept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "plan", pytest.fail)
    monkeypatch.setenv("COLUMNS", "80")
    before = (swept / "events").read_text()
    flags = ("--out", str(swept / "out"), "--events", str(swept / "events"), "--limit", "3")
    assert main(["sweep", str(swept / "job.toml"), *GRID, *flags]) == 0
    assert (swept / "events").read_text() == before
    lines = capsys.readouterr().out.splitlines()
    (told,) = [line for line in lines if "ask anew: shardwright sweep --fresh" in line]
    assert told.startswith("4 of 4 points are stored, the oldest ")
    assert all(len(line) <= 80 for line in lines if not line.startswith(("files in", told)))
    assert sum("SW_MESH_PRODUCT" in line for line in lines) == 2  # a row, and the reason once
    assert any("1 more rows" in line for line in lines)


def test_an_interrupt_keeps_what_is_done(swept: Path, tmp_path: Path) -> None:
    host = load(swept / "job.toml", [f"cache.dir={swept}/cache"])
    found = [
        Point({"seed": str(n)}, replace(host, goodput=replace(host.goodput, restart_s=n)))
        for n in range(6)
    ]
    journal = Journal(tmp_path / "points.jsonl")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    first = sweep(found, host, journal, interrupt)
    assert first.interrupted and len(first.rows) == 1 == len(journal.read())
    told: list[int] = []
    second = sweep(found, host, journal, lambda _row, done, total: told.append(total))
    assert not second.interrupted and len(second.rows) == 6
    assert second.known == 1 and told == [5] * 5


@pytest.mark.matrix
def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 in the middle: rows that were stored are not planned again, and no unit that was
    done is computed again."""
    job = write_job(tmp_path, run={"executor": "auto"}, cache={"dir": str(tmp_path / "cache")})
    out, grid = tmp_path / "out", "mesh.tp=1,2,4"
    command = [sys.executable, "-m", "shardwright", "sweep", str(job), "--out", str(out)]
    command += ["--mesh", "dp_shard=auto", "--vary", grid, "--vary", "remat=none,full"]
    journal, logs = Journal(out / "points.jsonl"), [tmp_path / "first", tmp_path / "second"]
    process = subprocess.Popen([*command, "--events", str(logs[0])], stderr=subprocess.DEVNULL)
    while len(journal.read()) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = journal.read()
    assert 2 <= len(kept) < 6
    again = subprocess.run([*command, "--events", str(logs[1]), "--json"], capture_output=True)
    assert again.returncode == 0 and os.path.exists(out / "sweep.csv")
    found = {p["key"]: p for p in json.loads(again.stdout)["points"]}
    assert len(found) == 6
    for key, row in kept.items():  # dollars are not stored: they depend on who asks
        assert row.metrics.items() <= found[key]["metrics"].items()
        assert "usd_per_hour" not in row.metrics and "usd_per_hour" in found[key]["metrics"]
    # A unit that was done when the process died may have died with it, before it was stored.
    stored = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    first, second = (events(log, "unit.done") for log in logs)
    assert not set(first) & set(second) and set(first) <= stored
    assert len(second) == len(set(second))
    # Every point was planned to its end once, in one of the two.
    assert len((out / "points.jsonl").read_text().splitlines()) == 6
