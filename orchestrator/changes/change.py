"""A job with something changed, in the words of the command line, or with what it leaves open
chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwright.compiler.frontend.task import Mode
from shardwright.orchestrator.config.config import JobConfig, Keys, MeshConfig
from shardwright.orchestrator.report.text import Report
from shardwright.sharding.settings import AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What is changed, as `--set` takes it, and the job with it."""

    text: str
    job: JobConfig


def changed(job: JobConfig, keys: Keys) -> Change:
    """The job with other values of some `table.key`s; a mesh is given whole, and the axes it does
    not name are left out, and so is a batch in tokens beside one in samples."""
    if "strategy.global_batch" in keys and job.strategy.global_batch_tokens:
        keys = {**keys, "strategy.global_batch_tokens": 0}
    if any(key.startswith("mesh.") for key in keys):
        job = dataclasses.replace(job, mesh=MeshConfig())
    text = " ".join(f"{key}={_shown(value)}" for key, value in keys.items())
    return Change(text, job.but(keys))


def _shown(value: Any) -> str:
    if value == AUTO and not isinstance(value, bool):
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def fixed(job: JobConfig, remat: str, micro_batch: int) -> JobConfig:
    """The job with values for the keys that it leaves to the memory."""
    values = {"strategy.remat": remat, "strategy.micro_batch": micro_batch}
    own = {key: values[key] for key in job.strategy.open_keys}
    given = job.given.difference(own)
    return dataclasses.replace(changed(job, own).job, given=given)


def compared(job: JobConfig) -> JobConfig:
    """A job that is compared with others: what it does not say is left to the memory, so that each
    of them is what one would run."""
    keys = {"strategy.remat": "auto", "strategy.micro_batch": AUTO}
    if job.model.mode != Mode.TRAIN:  # nothing is recomputed, and a batch is in flight as a whole
        return job
    return changed(job, {key: word for key, word in keys.items() if key not in job.given}).job


def frugal(job: JobConfig) -> JobConfig:
    """The job with what takes the least memory in place of what the memory is to decide."""
    return fixed(job, job.strategy.frugal.remat, job.strategy.smallest_micro_batch)


def as_chosen(job: JobConfig, report: Report) -> JobConfig:
    """A job with what was chosen for it, according to its report."""
    found = report.get("auto")
    return fixed(job, found["remat"], found["micro_batch"]) if found else job
