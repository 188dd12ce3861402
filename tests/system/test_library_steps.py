"""Steps in the style of their libraries (`tests/models/library_steps.py`) run and are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main
from tests.models.library_steps import STEPS
from tests.support.cells import long_in_matrix

IN_MATRIX = ("linen_batch_norm", "nnx_transformer", "equinox_rnn", "optax_loss_scaling")
"""One of each library, with state, dropout and conditions among them."""


@pytest.mark.parametrize(
    "name", long_in_matrix(STEPS, IN_MATRIX, [n for n in STEPS if n not in IN_MATRIX])
)
def test_a_step_of_a_library_equals_its_unsharded_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        f"""
        [model]
        entry = "tests.models.library_steps:{name}"
        [cluster]
        target = "trn1.2xlarge"
        [mesh]
        dp_shard = 2
        [strategy]
        global_batch = 8
        micro_batch = 4
        [run]
        steps = 2
        executor = "inline"
        """
    )
    assert main(["run", str(tmp_path / "job.toml"), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["numerics"]["passed"] and report["graph"]["params"] > 0
    roles = {row["role"] for row in report["graph"]["roles"]}
    assert {"parameter", "optimizer"} <= roles
