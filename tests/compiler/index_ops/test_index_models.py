"""Training steps of models that move data by index, compiled and sharded, against JAX in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright.compiler.frontend.reference import (
    batch_leaves,
    initial_state,
    reference_step,
    task_batches,
)
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sim_cluster.values.run_single import run_single
from tests.support.cells import long_in_matrix
from tests.support.compiled import check_against_jax, link
from tests.support.lowered_ranks import LoweredRanks
from tests.support.models_index import FORWARD, TASKS
from tests.support.road import captured_graph, fsdp_plan, leaf_error, split_batch, worst

SAMPLES = 4


def without(*prefixes: str) -> list[Any]:
    """The models, those of some prefixes (the slowest) only in the matrix."""
    return [
        pytest.param(name, marks=pytest.mark.matrix) if name.startswith(prefixes) else name
        for name in TASKS
    ]


@pytest.mark.parametrize("name", without("moe"))
def test_forward_at_both_levels(name: str) -> None:
    task = TASKS[name]()
    state = initial_state(task, 0).items()
    params = {k.removeprefix("params/"): v for k, v in state if k.startswith("params/")}
    batch = next(task_batches(task, 0, SAMPLES))
    check_against_jax(FORWARD[name], params, batch, bound=1e-5)


@pytest.mark.parametrize("name", long_in_matrix(TASKS, ["graph_net"], ["moe_sorted"]))
def test_step_on_one_core(name: str) -> None:
    task = TASKS[name]()
    graph, inputs, outputs = captured_graph(task, SAMPLES)
    program = link(graph)
    state, batch = initial_state(task, 0), next(task_batches(task, 0, SAMPLES))
    given = state | batch_leaves(batch)
    found = run_single(program, {f"arg{i}": given[s.name] for i, s in enumerate(inputs)})
    wanted = reference_step(task, state, batch)
    errors = {s.name: leaf_error(found[f"out{i}"], wanted[s.name]) for i, s in enumerate(outputs)}
    assert set(errors) == set(wanted) and worst(errors)[1] <= 1e-5, worst(errors)


@pytest.mark.parametrize("name", without("moe", "graph_net"))
def test_step_sharded_over_two_cores(name: str) -> None:
    task = TASKS[name]()
    plan = fsdp_plan(task, make_mesh({"dp_shard": 2}), SAMPLES // 2).step
    state, batch = initial_state(task, 0), next(task_batches(task, 0, SAMPLES))
    ranks = LoweredRanks(plan, state)
    ranks.run_step(split_batch(batch_leaves(batch), SAMPLES))
    wanted = reference_step(task, state, batch)
    names = [n for n, info in plan.buffers.items() if n in wanted and info.role != "batch"]
    errors = {n: leaf_error(ranks.gather(n), np.asarray(wanted[n])) for n in names}
    assert set(errors) == set(wanted) and worst(errors)[1] <= 1e-5, worst(errors)
