"""Steps in the shapes people write them (`tests/models/people_steps.py`) go the whole road: sharded
over many cores, in values, against plain jax on the whole batch.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main
from tests.models.people_steps import STEPS
from tests.support.cells import long_in_matrix

MESHES = {
    "fsdp": ("trn1.32xlarge", "dp_shard = 8\ndp_replicate = 4"),
    "two": ("trn1.2xlarge", "dp_shard = 2"),
    "tp": ("trn1.2xlarge", "tp = 2"),
}
CELLS = [(name, mesh) for name in STEPS for mesh in MESHES]
IN_MATRIX = (
    *(("in_place", "two"), ("scan_accumulation", "two")),
    ("every_other_step", "tp"),
)
"""State that changes in place, samples along another dim, a branch."""


@pytest.mark.parametrize(
    ("name", "mesh"), long_in_matrix(CELLS, IN_MATRIX, [c for c in CELLS if c not in IN_MATRIX])
)
def test_a_step_of_people_equals_its_unsharded_one(name: str, mesh: str, tmp_path: Path) -> None:
    target, axes = MESHES[mesh]
    (tmp_path / "job.toml").write_text(
        f"""
        [model]
        entry = "tests.models.people_steps:{name}"
        [cluster]
        target = "{target}"
        [mesh]
        {axes}
        [strategy]
        name = "fsdp"
        micro_batch = {4 if mesh == "tp" else 1}
        [run]
        steps = 2
        executor = "inline"
        """
    )
    assert main(["run", str(tmp_path / "job.toml"), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["numerics"]["passed"] and len(report["numerics"]["losses"]) == 2
    assert report["graph"]["params"] > 0 and report["timing"]["step_time_s"] > 0
    parameters = next(r for r in report["graph"]["roles"] if r["role"] == "parameter")
    assert parameters["elements"] == report["graph"]["params"]
