"""The U-Net of presets: its published parameters, and a tiny one on eight cores."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.models import unet
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.presets import UNETS, preset_task
from shardwright.sharding.partition.mesh import make_mesh
from tests.support.road import fsdp_plan, run_and_compare, worst

TINY = unet.UNet(image=8, width=64, multiples=(1, 2), blocks=1, attended=4)


@pytest.mark.parametrize(
    ("name", "count"), [("unet-ddpm32", 35_746_307), ("unet-ddpm256", 113_673_219)]
)
def test_published_parameters(name: str, count: int) -> None:
    """Source: the checkpoints google/ddpm-cifar10-32 and google/ddpm-celebahq-256 on Hugging Face;
    the paper says 35.7 and 114 million."""
    found = unet.shapes(unet.UNet(**UNETS[name]))
    shapes = jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, tuple))
    assert sum(map(math.prod, shapes)) == count


def test_the_way_up_reads_what_the_way_down_left() -> None:
    way = list(unet.parts(TINY))
    left = [TINY.width, *(part.made for part in way if part.name.startswith("down"))]
    assert [part.skipped for part in way if part.skipped] == left[::-1]
    assert [part.name for part in way if part.attends] == ["down1_0", "middle0", "up1_0", "up1_1"]


def test_an_image_has_no_length() -> None:
    with pytest.raises(UsageError, match=r"SW_SEQ_LEN.*got 4096"):
        preset_task("unet-ddpm32", seq_len=4096)


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param("none", marks=pytest.mark.exhaustive),
        pytest.param("full", marks=pytest.mark.matrix),
    ],
)
def test_eight_cores_make_the_step_of_one(remat: str) -> None:
    task = unet.train_task(TINY, TaskOptions(seq_len=1, optimizer="sgd", lr=0.1, remat=remat))
    plan = fsdp_plan(task, make_mesh({"dp_shard": 8}), 1)
    errors, _ = run_and_compare(plan.step, task)  # softmax does not see a key's bias
    errors = {name: error for name, error in errors.items() if not name.endswith("/b_k")}
    assert worst(errors)[1] <= 1e-5


@pytest.mark.exhaustive
def test_noise_is_learned() -> None:
    task = unet.train_task(TINY, TaskOptions(seq_len=1, optimizer="adam", lr=1e-3))
    assert task.init is not None and task.batches is not None
    state, batch = task.init(jax.random.key(0)), next(iter(task.batches(0, 4, None)))
    step, losses = jax.jit(task.step), []
    for _ in range(4):
        *state, metrics = step(*state, batch)
        losses.append(float(metrics["loss"]))
    assert np.all(np.diff(losses) < 0)
