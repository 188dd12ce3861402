"""Rematerialised steps under FSDP: scores do not wait between forward and backward, and the sharded
step stays equal to the unsharded one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.models import config_task
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from tests.models import flax_decoder
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph, run_and_compare
from tests.support.small_job import SIZES
from tests.support.step_plans import build_plan

T = 72  # nine head widths
RANKS = 2


def scanned() -> TrainTask:
    config = SIZES | {"max_position_embeddings": T}
    return config_task.train_task(config, seq_len=T, dtype="f32", remat="none")


def unrolled() -> TrainTask:
    return flax_decoder.train_task(width=32, num_layers=2, seq_len=T)


CASES: dict[str, Callable[[], TrainTask]] = {"scanned": scanned, "unrolled": unrolled}


def plan_of(task: TrainTask, form: str, num_microbatches: int = 1) -> Plan:
    graph, inputs, outputs = captured_graph(task, RANKS)
    graph = run(graph, step_passes(CompileOptions(attention=form)))
    return build_plan(
        graph,
        inputs,
        outputs,
        make_mesh({"dp_shard": RANKS}),
        num_microbatches=num_microbatches,
        unit=answer_request,
    )


def score_buffers(plan: Plan) -> list[str]:
    """Buffers between programs that hold T x T values."""
    return [
        name
        for name, info in plan.step.buffers.items()
        if sum(n == T for n in info.local_type.shape) > 1
    ]


@pytest.mark.parametrize("name", long_in_matrix(CASES, ["scanned"], ["unrolled"]))
def test_no_scores_between_forward_and_backward(name: str) -> None:
    """Only the user's arithmetic is repeated: every leaf is off by exactly as much as before."""
    task = CASES[name]()
    stored, recomputed = (plan_of(task, form, num_microbatches=2) for form in ("fused", "flash"))
    assert score_buffers(stored) and not score_buffers(recomputed)
    errors, _ = run_and_compare(recomputed.step, task)
    before, _ = run_and_compare(stored.step, task)
    assert errors == before
