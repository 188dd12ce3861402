"""Published configs have as many parameters as their pages say, exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.orchestrator.models import leaves
from shardwright.orchestrator.models.family_rows import FAMILIES
from shardwright.orchestrator.models.family_table import architecture_of

FACTS = json.loads((Path(__file__).parent / "published_configs.json").read_text())
MODELS: list[dict[str, Any]] = FACTS["models"]


@pytest.mark.parametrize("facts", MODELS, ids=[facts["model"] for facts in MODELS])
def test_a_published_config_has_its_published_parameters(facts: dict[str, Any]) -> None:
    model = architecture_of(facts["config"])
    assert leaves.count_params(model) == facts["parameters"]


def test_every_family_has_a_published_config() -> None:
    assert {facts["config"]["model_type"] for facts in MODELS} == set(FAMILIES)
