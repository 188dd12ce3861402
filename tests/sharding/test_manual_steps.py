"""Steps with parts per rank, partitioned: values of the ranks against the unsharded step."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.stablehlo import import_with_shardings
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.partition.mesh import Mesh, make_mesh
from shardwright.sharding.partition.partitioned import slots
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.settings import StrategySettings
from tests.models.manual_steps import make_task
from tests.support.road import fsdp_plan, run_and_compare, worst
from tests.support.step_plans import build_plan

SAMPLES = 8
AXES = {"ring_attention": "cp", "moe_all_to_all": "ep", "shard_map_gather_weights": "shard"}


def over_own_axes(name: str) -> Plan:
    """The step under strategy `manual`."""
    captured = capture(make_task(name), SAMPLES)
    graph, user = import_with_shardings(captured.artifact)
    return build_plan(
        run(graph, step_passes()),
        slots(captured.inputs),
        slots(captured.outputs),
        Mesh(((AXES[name], 4),)),
        settings=StrategySettings(name="manual"),
        num_microbatches=1,
        unit=answer_request,
        user=user,
    )


def check(plan: Plan, name: str) -> None:
    leaf, error = worst(run_and_compare(plan.step, make_task(name), 2)[0])
    assert error <= 1e-6, leaf


@pytest.mark.parametrize("name", AXES)
def test_over_the_users_axes(name: str) -> None:
    plan = over_own_axes(name)
    check(plan, name)
    kinds = Counter(op.name for part in plan.step.programs for op in part.graph.walk())
    if name == "moe_all_to_all":
        assert kinds["all_to_all"]
    if name == "shard_map_gather_weights":
        assert kinds["all_gather"] and kinds["reduce_scatter"]


@pytest.mark.parametrize("name", ["ring_attention", "shard_map_psum_step"])
def test_over_other_axes(name: str) -> None:
    check(fsdp_plan(make_task(name), make_mesh({"dp_shard": 4}), 2), name)
