"""A job on pipeline stages from the command line: what `plan` answers and shows."""

from __future__ import annotations

import json

import pytest

from orchestrator.__main__ import main
from orchestrator.screen import plan_screen
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
    assert shown.count("bubble") >= 2 and "0: bubble" in shown
    assert len(lines) <= 24
