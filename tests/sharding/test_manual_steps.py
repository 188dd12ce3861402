"""Steps with parts per rank, partitioned: values of the ranks against the unsharded step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
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
from tests.models.manual_steps import RAGGED, RANKS, make_task
from tests.support.road import fsdp_plan, run_and_compare, worst
from tests.support.step_plans import build_plan

SAMPLES = 8
WRITTEN = {
    "ppermute": "collective_permute",
    "all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
}
"""Primitives of jax that send shards as they are, by the collective that each is here."""
AXES = {"ring_attention": "cp", "moe_all_to_all": "ep", "shard_map_gather_weights": "shard"}


def over_own_axes(name: str) -> Plan:
    """The step under strategy `manual`."""
    captured = capture(make_task(name), SAMPLES)
    graph, user = import_with_shardings(captured.artifact)
    return build_plan(
        run(graph, step_passes()),
        slots(captured.inputs),
        slots(captured.outputs),
        Mesh((((AXES | {RAGGED: "ep"})[name], RANKS),)),
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
    asked = Counter(WRITTEN.get(p, "") for p in primitives(name))
    assert asked.total() > asked[""]
    for kind in WRITTEN.values():
        assert kinds[kind] == asked[kind], kind
    assert bool(kinds["all_gather"]) == (name == "shard_map_gather_weights")


def primitives(name: str) -> Iterator[str]:
    """What the traced step calls, gradients included."""
    task = make_task(name)
    state = jax.eval_shape(task.init, jax.random.key(0))

    def below(program: Any) -> Iterator[str]:
        for equation in program.eqns:
            yield equation.primitive.name
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from below(inner)

    return below(jax.make_jaxpr(task.step)(*state, task.batch(SAMPLES)).jaxpr)


@pytest.mark.parametrize("name", ["ring_attention", "shard_map_psum_step"])
def test_over_other_axes(name: str) -> None:
    check(fsdp_plan(make_task(name), make_mesh({"dp_shard": 4}), 2), name)


@pytest.mark.matrix
def test_rows_in_runs_over_the_users_axis() -> None:
    plan = over_own_axes(RAGGED)
    check(plan, RAGGED)
    kinds = Counter(op.name for part in plan.step.programs for op in part.graph.walk())
    asked = Counter(primitives(RAGGED))
    runs, others = asked["ragged_all_to_all"], asked["all_to_all"]
    assert (runs, others) == (3, 2)  # the gradient of what comes back, and offsets that it needs
    assert kinds["all_to_all"] == 2 * runs + others, kinds  # rows and places of each exchange
