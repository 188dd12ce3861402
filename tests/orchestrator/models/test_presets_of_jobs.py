"""Every preset is the model of a job, on any mesh and with any micro-batch."""

from __future__ import annotations

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator import api
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.models.presets import SIZED, UNETS, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_the_model_of_a_job(name: str) -> None:
    several = {"strategy__micro_batch": 2, "mesh__ep": 2}
    for settings in ({}, several):
        task = resolve_task(api.job(model__preset=name, **settings))
        assert task.name == name


@pytest.mark.parametrize("name", (*SIZED, *UNETS))
@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"model__capacity_factor": 1.25}, "SW_MODEL_SETTING"),
        ({"model__lora_r": 8}, "SW_LORA_MODEL"),
    ],
)
def test_what_a_preset_has_not_is_refused(name: str, settings: dict[str, float], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_task(api.job(model__preset=name, **settings))
    assert caught.value.diagnostic.code == code and name in str(caught.value)
