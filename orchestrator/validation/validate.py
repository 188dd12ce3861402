"""`validate`: published measurements predicted by the model, beside what was measured.

Training runs go the road of any job on their own mesh (`predict.py`) with the settings their
scripts had (`run_settings.toml`); kernels are compiled for one core, collectives priced by the
network. `calibrate.py` says what the fitted constants are worth on runs they were not fitted to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError, UsageError
from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.config.config import CacheConfig, JobConfig, asked_now
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.report.limits import Confidence, asked, confidence
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.service.unit_errors import stored_at
from shardwright.orchestrator.terminal.age import AGAIN, age_text, oldest
from shardwright.orchestrator.terminal.terminal import say_json
from shardwright.orchestrator.validation import calibrate, measured
from shardwright.orchestrator.validation.calibrate import (
    RECOVERY_GRID,
    STREAMING_GRID,
    Surface,
)
from shardwright.orchestrator.validation.predict import Predictor, Timed, job_of
from shardwright.orchestrator.validation.published import (
    PublishedRun,
    Row,
    UnreadableRun,
    read_runs,
)
from shardwright.orchestrator.validation.validate_screen import show
from shardwright.sim_cluster.calibration import constants
from shardwright.sim_cluster.profiles import NAMES, Profile, fitted_profile

NOMINAL = "nominal"
LAYOUTS = ("data-parallel", "tensor-parallel", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command was asked for: files, ids of training runs (none: every one)."""

    training: Path | None = None
    kernels: Path | None = None
    collectives: Path | None = None
    rows: tuple[str, ...] = ()
    fit: bool = False
    as_json: bool = False
    fresh: bool = False
    again: str = AGAIN  # the command that asks anew


@dataclass(frozen=True, slots=True)
class Prediction:
    """One run under every profile; `surface` for runs that constants may be fitted to."""

    run: PublishedRun
    times: Mapping[str, Timed]
    surface: Surface | None = None

    @property
    def seconds(self) -> float:
        """The nominal answer."""
        return self.times[NOMINAL].seconds

    @property
    def error(self) -> float:
        """Predicted over published at nominal rates, less 1."""
        return self.seconds / self.run.step_time_s - 1

    @property
    def band(self) -> tuple[float, float]:
        """From the fastest to the slowest profile."""
        found = [t.seconds for t in self.times.values()]
        return min(found), max(found)

    @property
    def band_covers(self) -> bool:
        """True when the published time lies between the profiles."""
        low, high = self.band
        return low <= self.run.step_time_s <= high


@dataclass(frozen=True, slots=True)
class Refused:
    """A run that cannot be predicted, and why."""

    run: Row
    reason: str


def run(asked: Asked) -> int:
    """Predict what was asked for and print it; returns the exit code. Raises UsageError for a bad
    file, an unknown id, or when there is nothing to do."""
    if not (asked.training or asked.kernels or asked.collectives):
        raise UsageError(
            "SW_USAGE", "validate requires one of --training, --kernels, --collectives, got none"
        )
    report: dict[str, Any] = {"schema": 2, "profile": NOMINAL}
    if asked.training:
        report["training"] = training(asked)
    if asked.kernels:
        report["kernels"] = measured.kernels(asked.kernels)
    if asked.collectives:
        report["collectives"] = measured.collectives(asked.collectives)
    if asked.as_json:
        say_json(report)
    else:
        show(report, asked.again)
    return 0


def training(question: Asked) -> Facts:
    """The report on training runs. With `fit`, constants are fitted to the primary ones, written to
    `calibration.toml` and used. Raises UsageError as `run`."""
    assert question.training is not None
    asked = select(read_runs(question.training), question.rows)
    runs = [item for item in asked if isinstance(item, PublishedRun)]
    job = asked_now(JobConfig(cache=CacheConfig(fresh=question.fresh)))
    with (
        Progress("quiet" if question.as_json else "auto") as progress,
        unit_service(job, progress) as service,
    ):
        predictor = Predictor(service, open_cache(job.cache))
        if question.fit:
            _fit([item for item in runs if item.primary], predictor, progress)
        found = [_told(item, predictor, progress) for item in in_order(runs)]
    found += [Refused(item, item.reason) for item in asked if isinstance(item, UnreadableRun)]
    place = {item.id: n for n, item in enumerate(asked)}
    report = summary(sorted(found, key=lambda p: place[p.run.id]))
    times = predictor.stored_s
    return report | {
        "predictions": predictor.asked,
        "stored": len(times),
        "stored_s": oldest(times),
    }


METHOD = "least pseudo-Huber loss (0.08) of log step times, both training constants together"


def _fit(runs: Sequence[PublishedRun], predictor: Predictor, progress: Progress) -> None:
    """Fit the constants to `runs`, those that can be predicted, and write them down. Raises
    UsageError when there is none: what earlier runs were fitted to then stays."""
    surfaces = []
    for item in runs:
        progress.say(f"{item.id} {item.model}: grid of the fitted constants")
        with contextlib.suppress(DiagnosticError):
            surfaces += [] if item.unsupported() else [surface(item, predictor)]
    if not surfaces:
        raise UsageError("SW_ROWS", "--fit requires a primary row that can be predicted, got none")
    calibrate.write(calibrate.chosen(surfaces), [s.run for s in surfaces], METHOD)


_NAMES = ("id", "group", "model", "primary")


def select(runs: Sequence[Row], rows: Sequence[str]) -> list[Row]:
    """The runs to predict: every one, those of some ids, or (`layouts`) the smallest supported one
    of each layout. Raises UsageError for an unknown id, or when no run is of a known family."""
    by_id = {item.id: item for item in runs}
    match list(rows):
        case [] | ["all"]:
            return list(runs)
        case ["layouts"]:
            return [*_smallest(runs)]
    for row in rows:
        if row not in by_id:
            raise UsageError("SW_ROWS", f"--rows requires ids of the file, got {row}")
    return [by_id[row] for row in rows]


def _smallest(runs: Sequence[Row]) -> list[PublishedRun]:
    """Per layout the primary run with the fewest cores, then parameters, then the first."""
    read = [item for item in runs if isinstance(item, PublishedRun)]
    usable = [item for item in read if not item.unsupported()]
    if not usable:
        raise UsageError("SW_ROWS", "the file requires a run of a known model family, got none")
    usable.sort(key=lambda r: (not r.primary, r.workload.cores, r.matmul_params))
    smallest = {item.workload.layout: item for item in reversed(usable)}  # the first is the last
    return [smallest[layout] for layout in LAYOUTS if layout in smallest]


def in_order(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Runs with equal workloads next to each other, so that each is built once."""
    order = list(dict.fromkeys(item.workload for item in runs))
    return sorted(runs, key=lambda item: order.index(item.workload))


def _told(item: PublishedRun, predictor: Predictor, progress: Progress) -> Prediction | Refused:
    """One run, predicted or refused."""
    progress.say(f"{item.id} {item.model}: {item.workload.layout}, {item.workload.cores} cores")
    if reason := item.unsupported():
        return Refused(item, reason)
    try:
        return predict(item, predictor)
    except DiagnosticError as error:
        stored_s = stored_at(error)
        age = f" (a stored refusal, {age_text(stored_s)})" if stored_s else ""
        return Refused(item, f"{error.diagnostic.message}{age}")


def predict(item: PublishedRun, predictor: Predictor) -> Prediction:
    """One run under every profile, a primary one on the grid of the fitted constants too. Raises
    the DiagnosticError of the stage that refuses it."""
    times = {name: predictor.time(item.workload, fitted_profile(name)) for name in NAMES}
    return Prediction(item, times, surface(item, predictor) if item.primary else None)


def surface(item: PublishedRun, predictor: Predictor) -> Surface:
    """One run on the grid of the fitted constants."""

    def seconds(streaming: float, recovery: float) -> float:
        profile = Profile(name=NOMINAL, streaming=streaming, stall_recovery=recovery)
        return predictor.time(item.workload, profile).seconds

    return Surface(item, tuple(tuple(seconds(s, r) for r in RECOVERY_GRID) for s in STREAMING_GRID))


def summary(found: Sequence[Prediction | Refused]) -> dict[str, Any]:
    """The report: a row per run, medians of absolute errors over all, and over primary ones."""
    made = [p for p in found if isinstance(p, Prediction)]
    surfaces = [p.surface for p in made if p.surface]
    left = calibrate.left_out(surfaces)
    peaks = {p.run.id: _peak_flops_per_s(p.run) for p in made}
    mfu, errors = calibrate.baseline([p.run for p in made], peaks) if made else (0.0, [])
    of_baseline = dict(zip(peaks, errors, strict=True))
    report: dict[str, Any] = {
        "rows": [
            _refused(p) if isinstance(p, Refused) else _row(p, left, of_baseline) for p in found
        ],
        "constants": {
            name: {"value": one.value, "band": list(one.band), "fitted_on": one.fitted_on}
            for name, one in constants().items()
        },
    }
    if made:
        report |= {
            "baseline_mfu": mfu,
            **measured.spread([p.error for p in made]),
            **measured.spread(errors, "baseline_"),
            "band_covers": sum(p.band_covers for p in made) / len(made),
            "refused": len(found) - len(made),
        }
    if primary := [p for p in made if p.surface]:
        own = [of_baseline[p.run.id] for p in primary]
        report["primary"] = {
            "rows": [p.run.id for p in primary],
            **measured.spread([p.error for p in primary]),
            **measured.spread(left.values(), "leave_one_group_out_"),
            "baseline_median_error": measured.spread(own)["median_error"],
        }
    return report


def _peak_flops_per_s(item: PublishedRun) -> float:
    """Published bf16 peak of all cores of a run."""
    w = item.workload
    return load_target(w.target).published_flops_per_s_per_core * w.cores


def _row(p: Prediction, left: Mapping[str, float], of_baseline: Mapping[str, float]) -> Facts:
    nominal = p.times[NOMINAL]
    return _named(p.run) | {
        "predicted_step_time_s": p.seconds,
        "published_step_time_s": p.run.step_time_s,
        "error": p.error,
        "band_s": list(p.band),
        "band_covers": p.band_covers,
        "confidence": _confidence(p.run).text,
        "left_out_error": left.get(p.run.id),
        "baseline_error": of_baseline[p.run.id],
        "shares": dict(nominal.shares),
        "busy": dict(nominal.busy),
    }


def _named(item: Row) -> dict[str, Any]:
    named: dict[str, Any] = {name: getattr(item, name) for name in _NAMES}
    if isinstance(item, UnreadableRun):
        return named | {"layout": None, "cores": None, "settings": None}
    w = item.workload
    return named | {"layout": w.layout, "cores": w.cores, "settings": item.settings.name}


def _refused(p: Refused) -> Facts:
    return _named(p.run) | {
        "predicted_step_time_s": None,
        "published_step_time_s": p.run.step_time_s if isinstance(p.run, PublishedRun) else None,
        "error": None,
        "reason": p.reason,
    }


def _confidence(item: PublishedRun) -> Confidence:
    """How far the answer for a run of that kind can be trusted."""
    job = job_of(item.workload)
    layout = layout_of(job)
    return confidence(asked(job, layout.target, layout.mesh.sizes, is_published=True))
