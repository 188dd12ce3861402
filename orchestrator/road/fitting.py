"""What the memory decides about a job: `auto` for `strategy.remat` and `strategy.micro_batch`; and
what a changed job is expected to need of it, before anything is compiled (`estimates`).

The least recomputation that fits comes first, then the largest micro-batch with it; samples per
step stay. What a compiled step needs is what decides; a candidate whose named buffers alone are too
large is not compiled. Every candidate is a plan of its own, and stored as one
(docs/design/0063-auto.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError, UsageError
from shardwright.orchestrator.changes.change import fixed, frugal
from shardwright.orchestrator.changes.situation import is_ours
from shardwright.orchestrator.config.config import KEYS, JobConfig
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.report.tried import FITS, REFUSED, TOO_LARGE, chosen_row, is_good
from shardwright.orchestrator.report.verdict import refusals
from shardwright.orchestrator.road.build import Planned, planned
from shardwright.orchestrator.road.stages import Stages, Traces
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.service.unit_errors import may_pass
from shardwright.sharding.settings import AUTO, DEFAULTS, REMATS

Report = dict[str, Any]
PIPELINE = "pp"


@contextmanager
def estimates(job: JobConfig, memory: Facts) -> Iterator[Callable[[JobConfig], tuple[float, int]]]:
    """A function of a changed job: the bytes that a core of it is expected to need, infinite where
    it is refused, and those that it may use. Sizes before compiling are upper bounds, so they are
    scaled by what compiling made of the job's own, whose section of the report `memory` is."""
    scale = memory["peak_bytes"] / memory["estimate"]["peak_bytes"]
    traces = Traces()
    with unit_service(job, None) as service:

        def expected(changed: JobConfig) -> tuple[float, int]:
            try:
                ready = planned(frugal(changed), service, Stages(traces=traces))
            except DiagnosticError:  # this model, mesh or batch does not allow it
                return math.inf, 1
            return scale * ready.plan.footprint.peak_bytes, ready.layout.target.limit_bytes

        yield expected


@dataclass(frozen=True, slots=True)
class Road:
    """How far a job can be taken: to its layout and its buffers, and to its report. Both raise the
    DiagnosticError of the stage that refuses."""

    ready: Callable[[JobConfig], Planned]
    plan: Callable[[JobConfig], Report]


def chosen(job: JobConfig, road: Road) -> Report:
    """The report of a job with the best values that fit for the keys it leaves to the memory, and
    what else was tried, as its section `auto`. Where nothing fits, the report is of what comes
    nearest. Raises the last DiagnosticError where every candidate is refused."""
    search = _Search(job, road)
    start = time.perf_counter()
    report = search.report()
    took = time.perf_counter() - start - sum(report["provenance"]["stages_s"].values())
    report["provenance"]["stages_s"]["auto"] = round(max(0.0, took), 3)
    return asked_as(report, job, search.section(report))


def asked_as(report: Report, job: JobConfig, section: Facts) -> Report:
    """The report of a fixed job as one of the job that was asked for."""
    whys = {
        "strategy.micro_batch": _why_micro_batch(section),
        "strategy.remat": "the least that fits" if is_good(chosen_row(section)) else NEAREST,
    }
    values = {key: section[key.partition(".")[2]] for key in whys}
    if not is_ours(job):
        whys["strategy.remat"], values["strategy.remat"] = "of the step", "as the step says"
    own = {key: {"value": values[key], "why": whys[key]} for key in job.strategy.open_keys}
    keys = {**report["resolved"], **own}
    resolved = {key: keys[key] for key in KEYS if key in keys}
    return report | {"job": job.as_dict(), "resolved": resolved, "auto": dict(section)}


NEAREST = "the nearest: nothing fits that neuronx-cc would take"


def _why_micro_batch(section: Facts) -> str:
    samples = section["samples_per_rank"]
    if samples == 1:
        return "a rank has one sample per step"
    if why := section["why_one_size"]:
        return str(why)
    if not is_good(chosen_row(section)):
        return NEAREST
    return f"the most of {samples} samples per rank that fit"


class _Search:
    """The candidates of a job, and what became of those that were looked at."""

    def __init__(self, job: JobConfig, road: Road) -> None:
        self._job, self._road = job, road
        self._rows: list[dict[str, Any]] = []
        self._reports: list[tuple[dict[str, Any], Report]] = []
        self._error: DiagnosticError | None = None
        self._samples, self._one_size = 1, ""

    def report(self) -> Report:
        """That of the first candidate that fits, else of the nearest."""
        for remat in self._remats():
            if (found := self._largest(remat)) is not None:
                return found
        if not self._reports:
            last = self._trial(self._remats()[-1], self._job.strategy.smallest_micro_batch)
            if last is None:
                assert self._error is not None
                raise self._error
        return min(self._reports, key=_distance)[1]

    def section(self, report: Report) -> dict[str, Any]:
        """What was chosen, and every candidate that was looked at, in that order."""
        row = next(row for row, found in self._reports if found is report)
        return {
            # A step that is not ours keeps what it keeps.
            "keys": [
                key
                for key in self._job.strategy.open_keys
                if key != "strategy.remat" or is_ours(self._job)
            ],
            "remat": row["remat"],
            "micro_batch": row["micro_batch"],
            "samples_per_rank": self._samples,
            "why_one_size": self._one_size,
            "tried": self._rows,
        }

    def _remats(self) -> Sequence[str]:
        if self._job.strategy.remat != "auto":
            return (self._job.strategy.remat,)
        return REMATS if is_ours(self._job) else (DEFAULTS.remat,)

    def _largest(self, remat: str) -> Report | None:
        """The report with the largest micro-batch that fits; None where none does."""
        first = self._job.strategy.smallest_micro_batch
        try:
            ready = self._road.ready(fixed(self._job, remat, first))
        except DiagnosticError as error:
            self._refused(remat, first, error)
            return None
        sizes = list(self._sizes(ready))
        needs = {size: _least_bytes(ready, size // first) for size in sizes}
        limit = ready.layout.target.limit_bytes
        open_sizes = [size for size in sizes if needs[size] <= limit]
        if len(open_sizes) < len(sizes):
            size = sizes[len(open_sizes)]
            self._rows.append(
                _row(remat, size, TOO_LARGE)
                | {"peak_bytes": needs[size], "compiled": False, "refused": []}
            )
        return _last_that(open_sizes, lambda size: self._fitting(remat, size))

    def _sizes(self, ready: Planned) -> Iterator[int]:
        """Micro-batches that may be taken, the smallest first."""
        strategy, layout = self._job.strategy, ready.layout
        self._samples = layout.num_microbatches * strategy.smallest_micro_batch
        if strategy.micro_batch != AUTO:
            self._one_size = "as the job says"
        elif self._job.model.hlo:
            self._one_size = "a lowered step has its samples"
        elif layout.mesh.sizes.get(PIPELINE, 1) > 1:
            self._one_size = "stages want many micro-batches"
        if self._one_size:
            return iter((strategy.smallest_micro_batch,))
        return (n for n in range(1, self._samples + 1) if self._samples % n == 0)

    def _fitting(self, remat: str, size: int) -> Report | None:
        """The report of a candidate that fits, and that the vendor's compiler takes."""
        report = self._trial(remat, size)
        return report if report is not None and is_good(self._rows[-1]) else None

    def _trial(self, remat: str, size: int) -> Report | None:
        try:
            report = self._road.plan(fixed(self._job, remat, size))
        except DiagnosticError as error:
            self._refused(remat, size, error)
            return None
        memory = report["memory"]
        row = _row(remat, size, FITS if memory["fits"] else TOO_LARGE) | {
            "peak_bytes": memory["peak_bytes"],
            "compiled": True,
            "refused": list(refusals(report)),
            "step_time_s": report["timing"]["step_time_s"],
        }
        self._rows.append(row)
        self._reports.append((row, report))
        return report

    def _refused(self, remat: str, size: int, error: DiagnosticError) -> None:
        """Note a candidate that is refused. Raises what refuses the whole job, and what says
        nothing about it."""
        if isinstance(error, UsageError) or may_pass(error):
            raise error
        self._error = error
        row = _row(remat, size, REFUSED)
        self._rows.append(row | {"code": error.code, "message": error.diagnostic.message})


def _row(remat: str, micro_batch: int, status: str) -> dict[str, Any]:
    return {"remat": remat, "micro_batch": micro_batch, "status": status}


def _least_bytes(ready: Planned, times: int) -> int:
    """What a core holds under a name, in its worst stage, with micro-batches so many times as
    large: activations that wait grow with them. No step needs less."""
    named = ready.plan.footprint.argument_bytes
    return sum(named.values()) + (times - 1) * named.get("activations", 0)


def _last_that(sizes: Sequence[int], fits: Callable[[int], Report | None]) -> Report | None:
    """What `fits` says of the last size that it holds for, of all before which it holds too. The
    last is asked first: what is surely too large is not among them."""
    low, high, found = 0, len(sizes) - 1, None
    middle = high
    while low <= high:
        if (report := fits(sizes[middle])) is not None:
            low, found = middle + 1, report
        else:
            high = middle - 1
        middle = (low + high) // 2
    return found


def _distance(tried: tuple[Facts, Report]) -> tuple[bool, int, float]:
    """How far from what was looked for: what fits is nearest, then what needs less."""
    row, _ = tried
    is_large = row["status"] != FITS
    return is_large, len(row["refused"]), row["peak_bytes"] if is_large else -math.inf
