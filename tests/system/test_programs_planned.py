"""Programs of `tests/corpus/programs.toml` that can be training steps, planned under FSDP over 8
cores of one instance, 4 replicas: every one is partitioned, compiled and timed.
"""

from __future__ import annotations

import pytest

import shardwright
from tests.corpus.steps import TRAINED, make_task
from tests.models import manual_steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*TRAINED, *manual_steps.SHAPES])
def test_a_plan(name: str) -> None:
    task = (manual_steps.make_task if name in manual_steps.SHAPES else make_task)(name)
    given = {"cluster__target": "trn1.32xlarge", "mesh__dp_shard": 8, "mesh__dp_replicate": 4}
    report = shardwright.plan(task, strategy__name="fsdp", **given)
    assert report.fits and report.exit_code == 0 and report.step_time_s > 0
    told = {found["code"] for found in report.data["findings"]}
    assert ("SW_SHARD_MAP" in told) == (name in manual_steps.SHAPES)
    assert report.data["collectives"] and report.data["units"]
