"""`model.capacity_factor`: what experts take of a sequence, of presets and configs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.models import config_task
from tests.support.cells import long_in_matrix
from tests.support.tiny_configs import tiny


def loss_of(family: str, factor: float) -> float:
    """The loss of the first step of a tiny model."""
    task = config_task.train_task(
        tiny(family, vocab_size=256), seq_len=16, remat="none", capacity_factor=factor
    )
    assert task.init and task.batches
    state = task.init(jax.random.key(0))
    batch = next(iter(task.batches(0, 2, None)))
    return float(task.step(*state, batch)[-1]["loss"])


@pytest.mark.parametrize(
    "family", long_in_matrix(["mixtral", "qwen3_moe", "gpt_oss"], [], ["mixtral", "qwen3_moe"])
)
def test_room_for_every_row_drops_none(family: str) -> None:
    """Seats for all rows of a sequence in every expert: what the grouped products compute."""
    every, seated = loss_of(family, 0.0), loss_of(family, 16.0)
    np.testing.assert_allclose(seated, every, rtol=1e-6)
    assert abs(loss_of(family, 0.1) - every) > 1e-6 * every  # most rows are dropped


def test_a_model_without_experts_has_no_capacity() -> None:
    job = JobConfig().but({"model.preset": "llama2-7b", "model.capacity_factor": 1.25})
    with pytest.raises(UsageError, match="requires a model with experts, got llama2-7b"):
        resolve_task(job)
