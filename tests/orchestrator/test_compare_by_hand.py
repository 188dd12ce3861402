"""What changed between two reports, as tables say it and as the terminal shows it; tables of
sweeps."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import hypothetical_text, load_target, logical
from shardwright.orchestrator.report import compare as module
from shardwright.orchestrator.report.compare import (
    compare,
    print_comparison,
    read_report,
    side,
    tables,
    title,
)
from shardwright.orchestrator.report.report import SCHEMA
from shardwright.orchestrator.report.tried import FITS, REFUSED, TOO_LARGE
from shardwright.orchestrator.whatif import table
from shardwright.orchestrator.whatif.rows import METRICS, Row
from shardwright.orchestrator.whatif.sweep import Swept

MIB = 2**20
GATHER = {
    "kind": "all_gather",
    "axis": "tp",
    "algorithm": "ring",
    "count": 2,
    "bytes": 8,
    "time_ps": 3_000_000,
    "exposed_ps": 0,
}
A: dict[str, Any] = {
    "schema": SCHEMA,
    "job": {
        "strategy": {"name": "fsdp", "remat": True},
        "cluster": {"instances": 2, "target": "trn1n.32xlarge"},
        "output": {"dir": "a"},
        "base": "/a",
    },
    "provenance": {},
    "graph": {"name": "llama", "flops_per_step": 2.5e15, "params": 1_234_567},
    "mesh": {"dp": 8, "tp": 1},
    "batch": {"tokens_per_sample": 16},
    "memory": {
        "peak_bytes": 3 * MIB,
        "limit_bytes": 4 * MIB,
        "categories": {"parameters": MIB, "other": 0},
    },
    "timing": {
        "step_time_ps": 2_000_000_000,
        "tokens_per_s": 1234.5,
        "mfu": 0.25,
        "hfu": 0.5,
        "breakdown_ps": {"compute": 1_500_000_000, "idle": 0},
    },
    "collectives": [GATHER],
    "cost": {"usd_per_step": 1.5, "usd_per_1e6_tokens": None},
    "cores": 64,
    "findings": [{"code": "SW_A", "message": "one"}, {"code": "SW_B", "message": "two"}],
}


def other() -> dict[str, Any]:
    b = copy.deepcopy(A)
    b["job"]["strategy"] = {"name": "fsdp", "remat": False, "zero": 3}
    b["job"]["output"]["dir"], b["job"]["base"] = "b", "/b"
    b["mesh"] = {"dp": 4, "tp": 1, "pp": 2}
    b["job"]["mesh"] = {"dp": 4, "pp": 2}  # which the table of the mesh says
    b["timing"]["step_time_ps"] = 4_000_000_000
    b["timing"]["breakdown_ps"] = {"compute": 3_000_000_000, "bubble": 1_000_000_000, "idle": 0}
    b["memory"]["categories"] = {"parameters": 2 * MIB, "other": 0}
    b["collectives"] = [GATHER | {"exposed_ps": 1_000_000}]
    b["findings"] = [
        {"code": "SW_B", "message": "two"},
        *[{"code": "SW_B", "message": "three"}] * 2,
    ]
    b["batch"]["tokens_per_sample"] = 1
    return b


def test_every_table() -> None:
    found = {caption: rows for caption, _, rows in tables(compare(A, other()))}
    assert list(found) == [
        "settings that differ",
        "mesh",
        "summary",
        "time of the step",
        "memory at the peak",
        "collectives that differ: count, time, exposed",
        "findings of A alone",
        "findings of B alone",
    ]
    assert found["settings that differ"] == [
        ("strategy.remat", "true", "false"),
        ("strategy.zero", "-", "3"),
    ]
    assert found["mesh"] == [("dp", "8", "4"), ("pp", "1", "2")]  # an axis of one is none
    assert found["summary"] == [
        ("step time", "2.000 ms", "4.000 ms", "+100.0 %"),
        ("tokens or samples per second", "1,234", "1,234", ""),
        ("MFU", "25.0 %", "25.0 %", ""),
        ("HFU", "50.0 %", "50.0 %", ""),
        ("memory per core", "3.00 MiB", "3.00 MiB", ""),
        ("memory limit", "4.00 MiB", "4.00 MiB", ""),
        ("cost per step", "$1.50", "$1.50", ""),
        ("cost per million tokens or samples", "no price", "no price", ""),
        ("cores", "64", "64", ""),
        ("FLOP per step", "2.5e+15", "2.5e+15", ""),
        ("parameters", "1,234,567", "1,234,567", ""),
    ]
    assert found["time of the step"] == [
        ("compute", "1.500 ms", "3.000 ms", "+100.0 %"),
        ("bubble", "0", "1.000 ms", "new"),
    ]
    assert found["memory at the peak"] == [("parameters", "1.00 MiB", "2.00 MiB", "+100.0 %")]
    (moved,) = found["collectives that differ: count, time, exposed"]
    assert moved == ("all_gather tp (ring)", "2, 3.0 us, 0", "2, 3.0 us, 1.0 us", "")
    assert found["findings of A alone"] == [("SW_A: one",)]
    assert found["findings of B alone"] == [("SW_B: three",)]


def test_equal_reports_have_figures_and_no_differences() -> None:
    found = compare(A, A)
    parts = {caption: columns for caption, columns, _ in tables(found)}
    four = ("", "A", "B", "change")
    assert parts == {"summary": four, "time of the step": four, "memory at the peak": four}
    name = "llama fsdp dp=8,tp=1 on 2 x trn1n.32xlarge"
    assert (found["names"], found["counted"]) == ([name, name], "tokens")


def test_what_was_chosen_for_a_job_stands_in_its_name() -> None:
    """The files may say nothing of it, and it is among the settings that differ."""
    keys = ["strategy.remat", "strategy.micro_batch"]
    auto = {"keys": keys, "remat": "none", "micro_batch": 2, "samples_per_rank": 4, "tried": []}
    (first, second) = compare(A | {"auto": auto}, A | {"auto": auto | {"keys": keys[:1]}})["names"]
    assert first == f"{title(A)}, auto: remat none, micro_batch 2"
    assert second == f"{title(A)}, auto: remat none"


def test_what_the_terminal_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of reports are longer than its lines, and are not broken."""
    console = Console(record=True, width=40, file=io.StringIO())
    monkeypatch.setattr(module.terminal, "console", lambda: console)
    print_comparison(compare(A, other()), "the command")
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[:8] == [
        "A llama fsdp dp=8,tp=1 on 2 x trn1n.32xlarge",
        "B llama fsdp dp=4,tp=1,pp=2 on 2 x trn1n.32xlarge",
        "",
        "settings that differ",
        " " * 19 + "A" + " " * 6 + "B",
        "strategy.remat  true  false",
        "strategy.zero      -      3",
        "",
    ]
    assert "SW_A: one" in lines and lines[-1] == "SW_B: three"


def test_reports_are_read_from_files_and_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(A))
    with pytest.raises(UsageError, match=r"report\.json: report"):
        read_report(tmp_path)
    monkeypatch.setattr(module, "check_report", lambda report: None)
    assert read_report(tmp_path) == read_report(tmp_path / "report.json") == A
    assert side(tmp_path) == A


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no JSON"),
        ("[]", f"requires schema {SCHEMA}, got none"),
        ('{"schema": 0}', f"requires schema {SCHEMA}, got 0"),
        ("{}", f"requires schema {SCHEMA}, got None"),
        (json.dumps({k: v for k, v in A.items() if k != "cost"}), "lacks cost"),
    ],
)
def test_what_is_no_report(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=told) as refused:
        read_report(tmp_path / "x.json")
    assert refused.value.code == "SW_REPORT"
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        read_report(tmp_path / "y.json")


def test_a_machine_that_nobody_can_configure() -> None:
    """16 logical cores of two physical ones, 2 x 16 GiB each."""
    target = logical(load_target("trn1n.32xlarge"), 2, hypothetical=True)
    assert hypothetical_text(target) == (
        "hypothetical: no trn1n.32xlarge has logical NeuronCores of 2 physical ones; shown as 16"
        " cores of 32 GiB per instance"
    )


# Tables of sweeps


def planned(name: str, status: str, tokens: float, **more: Any) -> Row:
    metrics = {
        "step_time_s": 0.12345,
        "tokens_per_s": tokens,
        "mfu": 0.256,
        "exposed": 0.0,
        "peak_gib": 12.345,
        "usd_per_1e6_tokens": None,
    }
    return Row(name, {"mesh.tp": name}, status, metrics=metrics | more)


ROWS = [
    Row("r1", {"mesh.tp": "5"}, REFUSED, "SW_MESH", "no such mesh\nat all"),
    planned("4", TOO_LARGE, 9000.0, over_gib=1.25),
    planned("2", FITS, 1000.0),
    planned("8", FITS, 2000.4),
    Row("r2", {"mesh.tp": "7"}, REFUSED, "SW_MESH", "the same"),
]


def shown(limit: int) -> list[str]:
    console = Console(record=True, width=100, file=io.StringIO())
    swept = Swept(rows=ROWS, known=1)
    table.show(console, swept, METRICS["tokens_per_s"], ["mesh.tp"], limit)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_table_of_a_sweep() -> None:
    """What fits first, the best of it; then what does not; then refusals, with their reason."""
    assert shown(3) == [
        "tp step s tokens/s   MFU exposed  GiB $/Mtok",
        "8  0.1235    2,000 25.6%    0.0% 12.3      -",
        "2  0.1235    1,000 25.6%    0.0% 12.3      -",
        "4  0.1235    9,000 25.6%    0.0% 12.3      - +1.25 GiB",
        "+: does not fit, by so much per core",
        "2 more rows in the files; --limit 0 shows all",
        "SW_MESH: 2 of 5 points, for example mesh.tp=5:",
        "  no such mesh",
    ]
    every = shown(5)
    assert every[4].split() == ["5", *"------", "SW_MESH"] and "more rows" not in " ".join(every)


def test_names_without_their_table_where_that_is_enough() -> None:
    assert table.short_names(["mesh.tp", "a.x", "b.x", "y"]) == {
        "mesh.tp": "tp",
        "a.x": "a.x",
        "b.x": "b.x",
        "y": "y",
    }


def test_the_document_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = table.document(
        Swept(rows=ROWS, known=0, interrupted=True), METRICS["tokens_per_s"], ["mesh.tp"]
    )
    order = [point["key"] for point in found.pop("points")]
    assert order == ["8", "2", "4", "r1", "r2"]
    assert found == {
        "schema": 1,
        "varied": ["mesh.tp"],
        "objective": "tokens_per_s",
        "interrupted": True,
        "prices": [],
        "goal": None,
    }
    frames: list[Any] = []
    monkeypatch.setattr(table, "_write_parquet", lambda *given: frames.append(given))
    for missing, parquet in (("pyarrow", False), ("pandas", False), ("", True)):
        monkeypatch.setattr(table.importlib.util, "find_spec", lambda n, m=missing: n != m)
        names = ["s.json", "s.csv", *(["s.parquet"] if parquet else [])]
        written = table.write_files(tmp_path, "s", {"a": 1}, ROWS[:3])
        assert written == [tmp_path / name for name in names]
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 1}
    head, first, second, _ = (tmp_path / "s.csv").read_text().split("\n")[:4]
    columns = "step_time_s,tokens_per_s,mfu,exposed,peak_gib,usd_per_1e6_tokens,over_gib"
    assert head == f"mesh.tp,status,code,reason,{columns}"
    assert first == '5,refused,SW_MESH,"no such mesh'
    assert second == 'at all",,,,,,,'
    ((flat, names_of, path),) = frames
    assert (len(flat), names_of[-1], path) == (3, "over_gib", tmp_path / "s.parquet")


def test_a_column_has_one_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers where texts of points are figures of plans too, else texts; what is missing stays
    so, and makes no other column of texts, of truths or of numbers."""
    pandas = pytest.importorskip("pandas")
    written: list[tuple[Any, ...]] = []

    def to_parquet(frame: Any, path: Path, index: bool) -> None:
        columns = {name: [None if v != v else v for v in frame[name]] for name in frame}
        written.append((columns, path, index))

    monkeypatch.setattr(pandas.DataFrame, "to_parquet", to_parquet)
    rows: list[dict[str, Any]] = [
        {"figure": "8", "name": "full", "text": "8", "truth": True, "number": 1},
        {"figure": 2, "name": 2.5, "text": "x", "truth": False, "other": 1},
        {"name": None, "figure": "4", "text": None},
    ]
    table._write_parquet(rows, ["text", "figure", "name", "truth", "number"], tmp_path)
    ((columns, path, index),) = written
    assert list(columns) == ["text", "figure", "name", "truth", "number"]
    assert columns["figure"] == [8, 2, 4] and columns["name"] == ["full", "2.5", None]
    assert columns["text"] == ["8", "x", None] and columns["number"] == [1, None, None]
    truths = columns["truth"]
    assert truths[:2] == [True, False] and all(type(truth) is bool for truth in truths[:2])
    assert truths[2] is None and (path, index) == (tmp_path, False)


def test_settings_of_a_table_that_only_one_job_has() -> None:
    """As of a job of another release: the other one has none of its keys."""
    newer = {
        "strategy": {"name": "fsdp"},
        "later": {"key": 1, "other": None},
        "cache": {"dir": "x"},
    }
    older = {"strategy": {"name": "fsdp"}, "base": "/b"}
    (row,) = module._settings(older, newer)
    assert row == {"key": "later.key", "a": None, "b": 1}
    (row,) = module._settings(newer, older)
    assert row == {"key": "later.key", "a": 1, "b": None}


@pytest.mark.parametrize("table", [[], "text", None, 3])
def test_a_table_of_the_job_that_is_none_on_one_side_is_left_out(table: Any) -> None:
    """A report may hold it under right checks: only some tables of the job are looked at."""
    other = copy.deepcopy(A)
    other["job"]["strategy"] = A["job"]["strategy"] | {"remat": False}
    other["job"]["cluster"] = table
    assert list(module._settings(A["job"], other["job"])) == [
        {"key": "strategy.remat", "a": True, "b": False}
    ]
