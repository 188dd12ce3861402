"""Comparison with the unsharded step, as `docs/numerics.md` defines it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.config import JobConfig
from orchestrator.model import compute_type
from sim_cluster.result import distance

if TYPE_CHECKING:
    from compiler.frontend.task import TrainTask

FP32_BOUND = 1e-5
BF16_BOUND = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The unsharded run: losses of every step, the state after one step, and the bound that
    follows."""

    losses: tuple[float, ...]
    after_one: Mapping[str, np.ndarray]
    bound: float


def worst_leaf(
    values: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]
) -> tuple[str, float]:
    """Name and error of the worst leaf of `reference`."""
    errors = {name: distance(values[name], array) for name, array in reference.items()}
    name = max(errors, key=lambda n: errors[n])
    return name, errors[name]


def worst_loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative error of any step's loss."""
    return max(
        distance(np.asarray(a), np.asarray(b)) for a, b in zip(losses, reference, strict=True)
    )


def least_bound(job: JobConfig) -> float:
    """The bound of a job before anything is known of the error of its compute type."""
    is_narrow = job.strategy.rounds or compute_type(job) != "float32"
    return BF16_BOUND if is_narrow else FP32_BOUND


def run_unsharded(
    job: JobConfig, global_batch: int, begun: Callable[[dict[str, np.ndarray]], None] | None = None
) -> Reference:
    """The reference of a job: fp32, on one device, on the same batches; `begun` is told the first
    state of the job, in its own type.

    For a process of its own. With a narrower compute type the bound is the larger of 1e-2 and
    the error of the unsharded run in that type; a policy that rounds an fp32 model counts as bf16.
    """
    from compiler.frontend.reference import initial_state, run_reference
    from orchestrator.model import resolve_task

    task = resolve_task(job)
    arguments: dict[str, Any] = {
        "steps": job.run.steps,
        "global_batch": global_batch,
        "seed": job.run.seed,
        "data": job.run.data,
        "keep": (1,),
    }
    if begun is not None and task.full_precision is not None:
        begun(initial_state(task, job.run.seed))
        begun = None
    run = run_reference(task.full_precision or task, **arguments, begun=begun)
    bound, narrow = FP32_BOUND, _narrow_task(job, task)
    if narrow is not None:
        short = run_reference(narrow, **{**arguments, "steps": 1})
        bound = max(BF16_BOUND, worst_leaf(short.states[1], run.states[1])[1])
    elif job.strategy.rounds:
        bound = BF16_BOUND
    return Reference(losses=run.losses, after_one=run.states[1], bound=bound)


def _narrow_task(job: JobConfig, task: TrainTask) -> TrainTask | None:
    """The task in the short type that the run computes in; None when there is none to be had: full
    precision, or the user's own fp32 step under a policy that rounds it.
    """
    from orchestrator.model import resolve_task

    if task.full_precision is not None:
        return task
    if not job.strategy.rounds or job.model.entry or job.model.hlo:
        return None
    return resolve_task(replace(job, model=replace(job.model, dtype="bfloat16")))
