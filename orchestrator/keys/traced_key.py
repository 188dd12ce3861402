"""The key of a question that is asked inside a process: the step as it was traced.

What a process has imported, changed or configured need not be what its files say: a cell of a
notebook, a closure, `jax.config.update`. All of it is in the trace.
"""

from __future__ import annotations

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.road.build import candidates
from shardwright.orchestrator.road.capture import placed_task
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.service.units import digest


def traced_parts(job: JobConfig, stages: Stages) -> dict[str, str]:
    """The parts of a plan's key that its model makes: every step it may be traced with.

    Raises what `placed_task` raises.
    """
    layout, task = placed_task(job, stages)
    tried = candidates(job, layout)
    samples = {n for one in tried for n in (one.samples, one.proof_samples) if n}
    place = f"{layout.mesh} {layout.captured_batch} {task.tokens_per_sample}"
    steps = {f"traced step of {n}": _step(job, task, n, stages) for n in samples}
    return {"traced layout": place} | steps


def _step(job: JobConfig, task: TrainTask, samples: int, stages: Stages) -> str:
    """The digest of a step, or why there is none: it may still be planned with other samples."""
    try:
        return stages.trace(job, task, samples).digest
    except DiagnosticError as error:
        return digest([repr(error.diagnostic).encode()])
