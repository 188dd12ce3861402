"""Steps in the style of their libraries (`tests/models/library_steps.py`) run and are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli import main
from tests.models.library_steps import STEPS

PARTS_OF_OTHERS = ("haiku_transformer",)
"""Dropout and biases of keys, which `linen_lm` and `nnx_transformer` have too, in half the time."""


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in STEPS if name not in PARTS_OF_OTHERS])
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
