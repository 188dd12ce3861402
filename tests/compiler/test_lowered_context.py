"""Steps over a split sequence, as lowered kernels over ranks: equal to the unsharded step, with no
mask in memory.
"""

from __future__ import annotations

import math

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.orchestrator.models import config_task
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.settings import StrategySettings
from tests.compiler.test_lowered_step import run_lowered_step
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph, worst
from tests.support.step_plans import build_plan

POSITIONS, CORES = 256, 2
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("context", long_in_matrix(["gather", "ring"], ["gather"]))
def test_masks_are_made_where_they_are_read(context: str) -> None:
    task = config_task.train_task(CONFIG, seq_len=POSITIONS)
    plan = build_plan(
        *captured_graph(task, 2),
        make_mesh({"dp_shard": 2, "cp": CORES}),
        unit=answer_request,
        settings=StrategySettings(context=context),
    )
    errors, ranks = run_lowered_step(plan.step, task)
    assert worst(errors)[1] <= 1e-5, worst(errors)
    inside = [t for unit in ranks.units.values() for t in unit.lowered.tensors]
    between = [b for program in ranks.outlined.programs for b in program.buffers]
    masks = [t for t in (*inside, *between) if t.dtype is DType.PRED]
    rows = POSITIONS // CORES
    assert all(math.prod(mask.shape) < rows * rows for mask in masks)
