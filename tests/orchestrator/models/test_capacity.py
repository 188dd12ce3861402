"""`model.capacity_factor`: what experts take of a sequence, of presets and configs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model import model_key, resolve_task
from shardwright.orchestrator.models import config_task, experts
from shardwright.orchestrator.models.architecture import Experts
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph
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
    "family",
    long_in_matrix(["mixtral", "qwen3_moe", "gpt_oss"], ["gpt_oss"], ["mixtral", "qwen3_moe"]),
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


@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (128, 8), (32, 4), (7, 3), (256, 8)])
def test_seats_for_every_row_are_as_many_as_rows(count: int, chosen: int) -> None:
    part = Experts(count=count, chosen=chosen, width=1).seated()
    found = [experts.capacity(part, rows) for rows in range(1, 600)]
    assert part.routing == "sorted"
    assert found == list(range(1, 600))


def test_rows_that_are_exchanged_or_of_several_samples_have_seats() -> None:
    """Blocks have no dim that picks an expert, and one matrix each."""
    job = JobConfig().but({"model.preset": "mixtral-8x7b", "mesh.dp_shard": 8})
    others = [job.but({"mesh.ep": 2}), job.but({"strategy.micro_batch": 2})]
    assert all(model_key(other) != model_key(job) for other in others)
    config = tiny("mixtral", vocab_size=256, max_position_embeddings=520)
    loops = []
    for seats_for_all in (False, True):
        task = config_task.train_task(config, seq_len=520, seats_for_all=seats_for_all)
        ops = list(captured_graph(task, 1)[0].walk())
        loops.append(sum(op.name == "loop" for op in ops))
    blocks, seats = loops
    assert blocks > seats == 2, "a loop over layers per pass"
