"""A tiny model of every family, partitioned over eight cores under fsdp and llm-training, makes the
step that one core makes."""

from __future__ import annotations

import pytest

from shardwright.orchestrator.models import config_task
from shardwright.orchestrator.models.family_rows import FAMILIES
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.settings import StrategySettings
from tests.support.cells import diagonals
from tests.support.road import captured_graph, run_and_compare, worst
from tests.support.step_plans import build_plan
from tests.support.tiny_configs import of_bytes

MESHES = {"fsdp": {"dp_shard": 8}, "llm-training": {"dp_shard": 2, "tp": 4}}
CELLS = [(family, strategy) for family in FAMILIES for strategy in MESHES]
QUICK = [("gemma2", "llm-training"), ("gpt_oss", "fsdp")]


@pytest.mark.parametrize(("family", "strategy"), diagonals(CELLS, 3, QUICK))
def test_eight_cores_make_the_step_of_one(family: str, strategy: str) -> None:
    """With SGD: AdamW makes a whole step of a gradient that is rounding alone."""
    config, length = of_bytes(family)
    task = config_task.train_task(config, seq_len=length, optimizer="sgd", lr=0.1)
    graph, inputs, outputs = captured_graph(task, 8)
    plan = build_plan(
        graph,
        inputs,
        outputs,
        make_mesh(MESHES[strategy]),
        num_microbatches=1,
        unit=answer_request,
        settings=StrategySettings(name=strategy),
    )
    errors, _ = run_and_compare(plan.step, task)
    if not FAMILIES[
        family
    ].rotary:  # softmax does not see a key's bias, where positions do not turn it
        errors = {name: error for name, error in errors.items() if not name.endswith("/bk")}
    assert worst(errors)[1] <= 1e-5
