"""`--explain fusion` on the command line, and what the screen says about the compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.compiler.fusion.logical_core import LogicalCore
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.lower.explain import explain_fusion
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.report import explain_time
from shardwright.orchestrator.report.explain_fusion import notes_of
from tests.support.machines import machine_file
from tests.support.small_job import SIZES


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **SIZES}))
    settings = ("model.seq_len=8", "run.executor=inline", "run.tries=0")
    return [
        *("plan", "--model", str(config), "--target", "trn1n.32xlarge", "--instances", "1"),
        *(word for setting in settings for word in ("--set", setting)),
    ]


@pytest.mark.matrix
def test_every_function_lists_its_kernels(job, capsys) -> None:
    assert main([*job, "--explain", "fusion", "--json"]) == 0
    functions = json.loads(capsys.readouterr().out)["fusion"]
    (layer,) = [f for f in functions if f["function"] == "forward.loop"]
    moved = [k["moved_bytes"] for k in layer["kernels"]]
    assert moved == sorted(moved, reverse=True) and moved[-1] > 0
    assert any("attending.py:" in k["location"] for k in layer["kernels"])
    rules = {m["rule"] for k in layer["kernels"] for m in k["refused"]}
    assert rules and rules <= {
        *("cycle", "kind", "indexing map", "duplicated iteration dim", "rows", "order", "budget"),
        *("streams", "size", "traffic", "intensity", "code", "slower"),
    }


def test_the_screen_names_the_attention_form(job, capsys) -> None:
    assert main([*job, "--set", "compiler.attention=fused", "--explain", "fusion"]) == 0
    text = capsys.readouterr().out
    assert "attention fused" in text and "forward.loop" in text and "not merged with" in text


def test_sharding_of_one_leaf(job, capsys) -> None:
    assert main([*job, "--explain", "sharding", "params/lm_head", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sharding"]
    (leaf,) = [t for t in found["tensors"] if t["name"] == "params/lm_head"]
    assert "dp_shard" in leaf["layout"] and leaf["decided"].startswith("recipe, largest dim")
    assert all("decoder.py:" in c["loc"] for c in found["collectives"])
    assert {c["kind"] for c in found["collectives"]} >= {"all_gather"}


def test_sharding_on_the_screen(job, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # where a line is broken depends on the names in it
    assert main([*job, "--explain", "sharding"]) == 0
    text = capsys.readouterr().out
    assert "decided by" in text and "collectives" in text and "sums over" in text
    assert "[dp_shard]" in text, "a layout is in brackets, which are no markup"


@pytest.mark.parametrize(
    ("words", "code"),
    [(("sharding", "nothing/like/this"), "SW_EXPLAIN"), (("weather",), "SW_USAGE")],
)
def test_what_is_not_there_is_refused(job, words: tuple[str, ...], code: str, capsys) -> None:
    assert main([*job, "--explain", *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code


def test_streamed_rows_are_noted(tmp_path) -> None:
    """What a kernel's code says of itself reaches the story of the kernel, and the screen."""
    b = Builder()
    q, k, v = b.input((256, 64)), b.input((16384, 64)), b.input((16384, 64))
    x = b.dot(q, k, ((1,), (1,)))
    wide = (256, 16384)
    e = b.op("exponential", b.op("subtract", x, b.broadcast(b.reduce(x, "max", (1,)), wide, (0,))))
    p = b.op("divide", e, b.broadcast(b.reduce(e, "add", (1,)), wide, (0,)))
    graph = b.finish(b.dot(p, v, ((1,), (0,))))
    small = load_target(machine_file(tmp_path, sbuf_bytes_per_partition=100_000))
    core = LogicalCore(small, CompileOptions())
    notes = [s.notes for s in explain_fusion(graph, Signature(), describe=notes_of(core))]
    assert any("online, one pass" in note for one in notes for note in one), notes


def test_time_sums_to_the_step_by_line_and_by_function(job, capsys) -> None:
    assert main([*job, "--explain", "time", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found, breakdown = report["time"], report["timing"]["breakdown_ps"]
    total = report["timing"]["step_time_ps"]
    assert found["step_time_ps"] == total == sum(row["time_ps"] for row in found["lines"])
    assert sum(row["time_ps"] for row in found["functions"]) == total - breakdown["idle"]
    code = [row for row in found["lines"] if "decoder.py:" in row["line"]]
    assert code and all(row["engines_ps"] for row in code)
    waits = {row["what"]: row["time_ps"] for row in found["lines"] if not row["line"]}
    assert waits["collective_dp_shard"] == breakdown["collective_dp_shard"]
    assert main([*job, "--explain", "time"]) == 0
    text = capsys.readouterr().out
    assert "by source line" in text and "decoder.py:" in text


def test_no_engine_is_busy_longer_than_the_step(capsys) -> None:
    """Two physical cores are busy 150 of 2 x 100 ps, in lines that add 60 and 40 ps to the step: 75
    %, in the first with work that hides behind the second."""
    line = {"what": "dot", "flops": 0, "hbm_bytes": 0}
    lines = [
        line | {"line": "a.py:1", "time_ps": 60, "engines_ps": {"tensor": 140, "vector": 60}},
        line | {"line": "a.py:2", "time_ps": 40, "engines_ps": {"tensor": 10}},
    ]
    section = {"step_time_ps": 100, "physical_cores": 2, "functions": [], "lines": lines}
    explain_time.show(section)
    shown = capsys.readouterr().out
    assert "tensor 70.0 %" in shown and "tensor 5.0 %" in shown


def test_every_collective_has_its_reason_and_the_other_algorithms(job, capsys) -> None:
    assert main([*job, "--explain", "collective", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["collective"]
    assert sum(row["time_ps"] for row in rows) == sum(r["time_ps"] for r in report["collectives"])
    exposed = [row["exposed_ps"] for row in rows]
    assert exposed == sorted(exposed, reverse=True)
    for row in rows:
        names = [one["algorithm"] for one in row["alternatives"]]
        times = [one["time_ps"] for one in row["alternatives"]]
        assert row["why"] and row["algorithm_in_full"] not in names
        assert len(set(names)) == len(names) >= 1 and times == sorted(times) and times[0] > 0
    assert main([*job, "--explain", "collective"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{rows[0]['algorithm_in_full']}, because" in text and "Others: " in text


@pytest.mark.parametrize("words", [("speed",), ("time", "x"), ("sharding", "a", "b")])
def test_what_nothing_explains_is_refused(job, capsys, words: tuple[str, ...]) -> None:
    assert main([*job, "--explain", *words]) == 2
    assert "--explain requires one of collective, fusion" in capsys.readouterr().err
