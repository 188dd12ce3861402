"""A job on pipeline stages from the command line: what `plan` answers and shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.report.plan_screen import LINES, plan_screen, screen_lines
from tests.support.small_job import SIZES, write_job

STAGES, MICRO_BATCHES = 4, 8


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The report of `plan --mesh pp=4,...` of a Llama of four layers on one instance."""
    folder = tmp_path_factory.mktemp("job")
    job = write_job(folder, strategy={"name": "llm-training", "global_batch": 4 * MICRO_BATCHES})
    config = SIZES | {"num_hidden_layers": 4, "max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps(config))
    out = folder / "answer.json"
    with pytest.MonkeyPatch.context() as patch, out.open("w") as file:
        patch.setattr("sys.stdout", file)
        code = main(["plan", str(job), "--mesh", "pp=4,dp_shard=4,tp=2", "--json"])
    assert code == 0
    found: dict = json.loads(out.read_text())
    return found


@pytest.mark.matrix
def test_time_and_memory_of_every_stage(report: dict) -> None:
    timing, memory = report["timing"], report["memory"]
    assert report["mesh"] == {"pp": STAGES, "dp_shard": 4, "tp": 2}
    assert [row["stage"] for row in timing["per_stage"]] == list(range(STAGES))
    for row in timing["per_stage"]:
        assert sum(row["breakdown_ps"].values()) == timing["step_time_ps"]
        assert row["breakdown_ps"]["bubble"] > 0
    assert timing["breakdown_ps"]["bubble"] > 0
    assert max(row["peak_bytes"] for row in memory["per_stage"]) == memory["peak_bytes"]
    for row in memory["per_stage"]:
        assert sum(row["categories"].values()) == row["peak_bytes"]
        assert row["categories"]["activations"] > 0
    assert {row["stage"] for row in report["programs"]} == set(range(STAGES))
    assert {row["axis"] for row in report["collectives"]} >= {"pp", "tp", "dp_shard"}


def test_the_screen_shows_the_pipeline(report: dict, capsys: pytest.CaptureFixture[str]) -> None:
    plan_screen(report)
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("pipeline"))
    assert "4 stages" in lines[at]
    shown = " ".join(lines[at + 1 : at + 3])
    assert shown.count("bubble") >= 2 and "0: 1 layers, bubble" in shown
    assert len(screen_lines(report, 80, LINES)) <= LINES


def test_the_report_says_who_has_what(report: dict) -> None:
    pipeline = report["pipeline"]
    assert pipeline["num_microbatches"] == MICRO_BATCHES and pipeline["balance"] == "cost"
    assert sum(sum(row["layers"]) for row in pipeline["stages"]) == 4
    assert sum(row["cost_share"] for row in pipeline["stages"]) == pytest.approx(1.0)
    assert pipeline["bubble_of_equal_stages"] == pytest.approx(3 / 11)
    assert "SW_PIPELINE_BUBBLE" not in {f["code"] for f in report["findings"]}


@pytest.mark.matrix
def test_few_micro_batches_are_a_note_with_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, strategy={"name": "llm-training"})
    config = SIZES | {"num_hidden_layers": 4, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = ["plan", str(job), "--mesh", "pp=4,dp_shard=4,tp=2", "--explain", "sharding"]
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (note,) = (f for f in found["findings"] if f["code"] == "SW_PIPELINE_BUBBLE")
    assert "1 micro-batch" in note["message"] and "75 %" in note["message"]
    assert note["hint"] == "set strategy.global_batch: 32 for 27 %, 64 for 16 %, 128 for 8.6 %"
    assert found["sharding"]["stages"] == found["pipeline"]["stages"]
