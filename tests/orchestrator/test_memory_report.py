"""The memory section of a report, `--explain memory`, and changes that are planned, not guessed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config
from shardwright.orchestrator.report.memory_report import MOMENTS, _highest, _timeline
from shardwright.orchestrator.road.build import planned
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.units import unit_service
from shardwright.sharding.memory.arena import Moment
from tests.support.small_job import SIZES


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("memory")
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES}))
    settings = (
        *(
            "model.seq_len=8",
            "run.executor=inline",
            "run.tries=0",
            "strategy.remat=none",
        ),
        *("strategy.name=generic", "strategy.micro_batch=2", "mesh.dp_replicate=8"),
        "mesh.dp_shard=4",
    )
    flags = ["--model", str(path), "--target", "trn1n.32xlarge", "--instances", "1"]
    return [*flags, *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture(scope="module")
def memory(words: list[str]) -> dict[str, Any]:
    """The section of `plan --explain memory --json`."""
    capture = pytest.MonkeyPatch()
    lines: list[str] = []
    capture.setattr("builtins.print", lambda text, **_: lines.append(text))
    try:
        assert main(["plan", *words, "--explain", "memory", "--json"]) == 0
    finally:
        capture.undo()
    section: dict[str, Any] = json.loads("\n".join(lines))["memory"]
    return section


def test_the_parts_add_up(memory) -> None:
    arena = max(memory["arena_bytes"].values())
    assert memory["arena_bytes"][memory["peak_program"]] == arena
    assert memory["peak_bytes"] == sum(memory["categories"].values())
    assert memory["peak_bytes"] == sum(memory["argument_bytes"].values()) + arena
    assert memory["limit_bytes"] + memory["reserve_bytes"] == 16 * 2**30
    assert memory["estimate"]["peak_bytes"] >= memory["peak_bytes"]


def test_the_columns_of_the_runtime_sum_to_all_that_is_reserved(memory) -> None:
    columns = dict(memory["runtime"])
    total = columns.pop("TOTAL")
    assert total == sum(columns.values()) == memory["peak_bytes"] + memory["reserve_bytes"]
    assert columns["Model Code"] == 96 * 10**6
    assert columns["Shared Scratchpad"] == max(memory["arena_bytes"].values())
    assert memory["bank"] == {"bytes": 16 * 2**30, "cores": 1}


def test_the_timeline_goes_through_every_program_with_layers_once(memory) -> None:
    rows = memory["timeline"]
    assert list(dict.fromkeys(r["program"] for r in rows)) == ["forward", "backward", "update"]
    layers = [r for r in rows if r["what"] in ("forward.loop", "backward.loop")]
    assert [r["repeats"] for r in layers] == [SIZES["num_hidden_layers"]] * 2
    named = sum(memory["argument_bytes"].values())
    assert all(named <= r["live_bytes"] <= memory["peak_bytes"] for r in rows)
    assert all(r["live_bytes"] == sum(r["categories"].values()) for r in rows)
    for program in memory["arena_bytes"]:
        positions = [r["position"] for r in rows if r["program"] == program]
        assert positions == list(range(len(positions)))


def test_a_long_timeline_keeps_its_highest_moments() -> None:
    programs = ("forward", "backward")
    long = [
        Moment(program, place, "f", 1, {"other": (place * 7919) % 1009})
        for program in programs
        for place in range(5000)
    ]
    kept = list(_highest(long))
    assert len(kept) <= MOMENTS + len(programs)
    for program in programs:
        sizes = [m.live_bytes for m in long if m.program == program]
        assert max(m.live_bytes for m in kept if m.program == program) == max(sizes)
    assert list(_highest(long[:MOMENTS])) == long[:MOMENTS]


def test_tensors_at_the_peak_have_file_and_line(memory) -> None:
    rows = memory["largest"]
    assert [r["bytes"] for r in rows] == sorted((r["bytes"] for r in rows), reverse=True)
    assert sum("orchestrator/models/" in r["loc"] for r in rows) > len(rows) // 2
    assert {r["category"] for r in rows} <= set(memory["categories"])


def peak(words: list[str], *change: str) -> int:
    """The estimated peak of the job with a change, planned here."""
    sets = [text for text in (*words, *change) if "=" in text]
    model = {"model.config": words[1]}
    job = config.load(None, sets, model)
    with unit_service(job, None) as service:
        return planned(job, service, Stages()).plan.footprint.peak_bytes


def test_changes_save_what_they_say(memory, words) -> None:
    rows = {row["change"]: row for row in memory["suggestions"]}
    assert {"strategy.remat=full", "strategy.zero=3"} <= set(rows)
    saved = [row["saves_bytes"] for row in memory["suggestions"]]
    assert saved == sorted(saved, reverse=True) and saved[-1] > 0
    before = peak(words)
    for change in (
        "strategy.remat=full",
        "strategy.zero=1",
        "mesh.dp_replicate=1 mesh.dp_shard=32",
    ):
        after = peak(words, *change.split())
        if change in rows:
            then = round(after * memory["peak_bytes"] / before)
            assert rows[change]["peak_bytes"] == then
            assert rows[change]["saves_bytes"] == memory["peak_bytes"] - then
        else:
            assert after >= before


def test_the_screen_shows_time_tensors_and_changes(words, capsys) -> None:
    assert main(["plan", *words, "--explain", "memory"]) == 0
    text = capsys.readouterr().out
    assert "bytes in use over the step" in text and "backward.loop" in text
    assert "largest tensors at the peak" in text and "decoder.py:" in text
    assert "strategy.remat=full" in text
    assert "as the runtime reports it" in text and "Model Code" in text and "HBM bank" in text
    lines = text[text.index("largest tensors") :].splitlines()
    at = next(n for n, line in enumerate(lines) if "bytes" in line)
    header, rows = lines[at], lines[at + 1 : at + 8]
    ends = {match.end() for row in rows if (match := re.search(r"\d (B|KiB)", row))}
    assert ends == {header.index("bytes") + len("bytes")}, "sizes stand below each other"


def test_state_that_cannot_fit_is_refused_before_compiling(
    memory, words, capsys, monkeypatch, tmp_path
) -> None:
    """Named buffers alone are above the limit; the error says what each change saves."""

    def never(*_: object) -> None:
        raise AssertionError("compiled")

    named = sum(memory["argument_bytes"].values())
    monkeypatch.setattr("shardwright.compiler.machine.target.Target.limit_bytes", named - 1)
    monkeypatch.setattr("shardwright.orchestrator.road.job.compile_planned", never)
    job = tmp_path / "job.toml"
    job.write_text("")
    assert main(["run", str(job), *words, "--out", str(tmp_path / "out"), "--json"]) == 71
    failed = json.loads(capsys.readouterr().out)["error"]
    assert failed["code"] == "SW_CAPACITY"
    assert "strategy.zero = 1 (saves" in failed["hint"] and "micro_batch (saves" in failed["hint"]
    assert "mesh.dp_shard" not in failed["hint"]  # zero 0 splits nothing over it


def test_bars_show_what_lies_above_named_buffers() -> None:
    """100 bytes are named: of 300 in use 200 lie above, the full bar of 16; of 200 half of that."""
    row = {"program": "forward", "what": "add", "repeats": 1}
    rows = [{**row, "position": n, "live_bytes": size} for n, size in enumerate((300, 200, 100))]
    memory = {"argument_bytes": {"a": 100}, "timeline": rows, "arena_bytes": {"forward": 300}}
    assert list(_timeline(memory).columns[-1].cells) == ["#" * 16, "#" * 8, ""]
    memory["timeline"] = rows[2:]  # nothing lies above
    assert list(_timeline(memory).columns[-1].cells) == [""]
