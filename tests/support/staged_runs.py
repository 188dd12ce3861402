"""Whole steps of a distribution with several micro-batches, on NumPy ranks, against the unsharded
graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import numpy as np

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.program import StepPlan
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.partition.mesh import DATA_AXES, Mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.prepare.phantom_replica import (
    MIXED_SAMPLES,
    PROOF_SAMPLES,
    TRACED_SAMPLES,
    MeanProof,
    check_means,
    needs_phantom,
)
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import captured_graph, leaf_error
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import Distribution, random_inputs

Make = Callable[[], TrainTask]


@functools.cache
def captured(
    make: Make, samples: int, save_rows: bool = False
) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    """The step as jobs partition it: after the step passes."""
    graph, inputs, outputs = captured_graph(make(), samples)
    return run(graph, step_passes(DEFAULTS, samples, save_rows)), inputs, outputs


@functools.cache
def plan_of(make: Make, how: Distribution, num_microbatches: int, samples: int = 2) -> Plan:
    """The plan of a step as jobs make it; `samples` per data-parallel rank and micro-batch."""
    micro = samples * how.mesh.size(DATA_AXES)
    if not needs_phantom(how.mesh, how.settings, micro, num_microbatches):
        return _plan(make, how, num_microbatches, micro)
    try:
        kept = _saves_rows(how)
        both = (captured(make, n, kept)[0] for n in (TRACED_SAMPLES, PROOF_SAMPLES))
        proof = check_means(*both)
        return _plan(make, how, num_microbatches, TRACED_SAMPLES, proof)
    except ShardingError as refused:
        assert refused.code == MIXED_SAMPLES
        return _plan(make, how, num_microbatches, micro)


def _saves_rows(how: Distribution) -> bool:
    return how.settings.context == "ring"


def _plan(
    make: Make,
    how: Distribution,
    num_microbatches: int,
    samples: int,
    proof: MeanProof | None = None,
) -> Plan:
    graph, inputs, outputs = captured(make, samples, _saves_rows(how))
    return build_plan(
        graph,
        inputs,
        outputs,
        how.mesh,
        settings=how.settings,
        num_microbatches=num_microbatches,
        unit=answer_request,
        proof=proof,
    )


def cut_step(
    captured: tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]], mesh: Mesh, num_microbatches: int
) -> StepPlan:
    """The step as it is cut, no collective moved."""
    with mock.patch("shardwright.sharding.plan.overlap", lambda step, *_: step):
        plan = build_plan(*captured, mesh, num_microbatches=num_microbatches, unit=answer_request)
    return plan.step


def step_errors(
    make: Make, how: Distribution, num_microbatches: int, samples: int = 2
) -> dict[str, float]:
    """Errors of every output of one step against the unsharded graph on the whole batch."""
    plan = plan_of(make, how, num_microbatches, samples)
    micro = samples * how.mesh.size(DATA_AXES)
    graph, inputs, outputs = captured(make, micro * num_microbatches)
    arrays = random_inputs(graph, inputs)
    given = {slot.name: array for slot, array in zip(inputs, arrays, strict=True)}
    wanted = evaluate(graph, arrays)
    ranks = ReferenceRanks(plan.step, given)
    ranks.run_step([_micro_batch(inputs, given, k, micro) for k in range(num_microbatches)])
    return {
        slot.name: leaf_error(ranks.gather(slot.name), array)
        for slot, array in zip(outputs, wanted, strict=True)
    }


def _micro_batch(
    inputs: tuple[Slot, ...], given: dict[str, np.ndarray], number: int, size: int
) -> dict[str, np.ndarray]:
    rows = range(number * size, (number + 1) * size)
    batch = (slot for slot in inputs if slot.role == "batch")
    return {s.name: np.take(given[s.name], rows, axis=s.batch_dim or 0) for s in batch}


def state_after(
    step: StepPlan, captured: tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]
) -> dict[str, bytes]:
    """Every buffer that a step of two micro-batches on reference ranks leaves to the next one, and
    the metrics; the second micro-batch has the samples of the first in reverse.
    """
    graph, inputs, outputs = captured
    given = dict(zip((s.name for s in inputs), random_inputs(graph, inputs), strict=True))
    batch = {s.name: given[s.name] for s in inputs if s.role == "batch"}
    ranks = ReferenceRanks(step, given)
    ranks.run_step([{n: a[::-1] if m else a for n, a in batch.items()} for m in range(2)])
    return {s.name: ranks.gather(s.name).tobytes() for s in outputs}
