"""A published config of every family is planned at its full size: an answer, or a refusal that says
what is required."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.orchestrator import api
from shardwright.orchestrator.models.family_rows import FAMILIES

MODELS = json.loads((Path(__file__).parent / "published_configs.json").read_text())["models"]
LARGEST: dict[str, dict[str, Any]] = {}
for _facts in MODELS:  # of each family, by parameters
    _family = _facts["config"]["model_type"]
    if _facts["parameters"] > LARGEST.get(_family, {"parameters": 0})["parameters"]:
        LARGEST[_family] = _facts
LENGTHS = {"bert": 512, "t5": 512, "gpt2": 1024, "gpt_neox": 2048, "vit": 0}
TARGETS = ("trn1n.32xlarge", "trn2.48xlarge")


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_published_model_of_a_family_is_planned(
    family: str, target: str, tmp_path: Path
) -> None:
    facts = LARGEST[family]
    job = api.job(
        model__config=json.dumps(facts["config"]),
        model__seq_len=LENGTHS.get(family, 4096),
        model__dtype="bfloat16",
        cluster__target=target,
        cache__dir=tmp_path,
        run__executor="inline",
    )
    report = api.plan(job)
    assert report.step_time_s > 0
    assert report.data["graph"]["params"] >= facts["parameters"]
