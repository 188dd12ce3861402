"""The first thing to run: the whole road for a tiny job, through the command, in half a minute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
JOB = """
[model]
config = "config.json"
[mesh]
dp_replicate = 2
dp_shard = "auto"
[strategy]
global_batch = 64
[run]
steps = 2
"""


def test_a_job_from_jax_to_a_simulated_trn1n(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    out = tmp_path / "out"
    assert main(["run", str(tmp_path / "job.toml"), "--out", str(out)]) == 0
    assert "fits" in capsys.readouterr().out

    report = json.loads((out / "report.json").read_text())
    assert report["schema"] == 1
    assert report["mesh"] == {"dp_replicate": 2, "dp_shard": 16}
    assert report["numerics"]["worst_loss_error"] <= 1e-5
    assert report["numerics"]["worst_param_error"]["error"] <= 1e-5
    assert max(report["numerics"]["l0"].values()) <= 1e-5
    timing = report["timing"]
    assert sum(timing["breakdown_ps"].values()) == timing["step_time_ps"] > 0
    assert sum(report["memory"]["categories"].values()) == report["memory"]["peak_bytes"]
    assert {c["axis"] for c in report["collectives"]} >= {"dp_shard", "dp_replicate"}
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert main(["neff", "verify", str(out / "bundle")]) == 0
