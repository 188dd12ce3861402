"""Fitting the constants of `sim_cluster/calibration.toml` that training runs identify, and what
such a fit is worth.

Every run is timed on a small grid of the two constants; between the points the logarithm of its
time is interpolated, so that a fit, and one fit per group left out, need no further runs. The loss
forgives single rows (pseudo-Huber), since releases of one setup differ by more than the model can.
A fit is adopted only where it predicts groups it has not seen better than documented rates do.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import product, starmap

from shardwright.orchestrator.validation.published import PublishedRun
from shardwright.sim_cluster import calibration
from shardwright.sim_cluster.profiles import STALL_RECOVERY, STREAMING

# Between these corners the interpolation is within 1 % of a run of its own (measured on 9 points).
STREAMING_GRID = (0.75, 1.0)
RECOVERY_GRID = (0.0, 1.0)
_STEPS = 20  # of the search along each constant
_HUBER = 0.08  # relative error up to which a row counts in full (the spread between releases)


@dataclass(frozen=True, slots=True)
class Fit:
    """Values of the two constants."""

    streaming: float
    stall_recovery: float


DOCUMENTED = Fit(1.0, 0.0)
"""Documented rates, and our code as it is."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Predicted seconds of one run over the grid: `seconds[streaming][recovery]`."""

    run: PublishedRun
    seconds: tuple[tuple[float, ...], ...]

    def at(self, fit: Fit) -> float:
        """Seconds at a point of the grid's range, linear in the logarithm."""
        u, v = _part(STREAMING_GRID, fit.streaming), _part(RECOVERY_GRID, fit.stall_recovery)
        (slow, slow_filled), (fast, fast_filled) = self.seconds
        corners = (
            (slow, (1 - u) * (1 - v)),
            (fast, u * (1 - v)),
            (slow_filled, (1 - u) * v),
            (fast_filled, u * v),
        )
        return math.exp(sum(weight * math.log(seconds) for seconds, weight in corners))

    def error(self, fit: Fit) -> float:
        """Predicted over published, less 1."""
        return self.at(fit) / self.run.step_time_s - 1


def _part(grid: tuple[float, float], value: float) -> float:
    """How far `value` is from the first to the last point of a grid."""
    low, high = grid
    return (value - low) / (high - low)


def best_fit(surfaces: Sequence[Surface]) -> Fit:
    """The constants with the least loss over `surfaces`."""
    candidates = starmap(Fit, product(_along(STREAMING_GRID), _along(RECOVERY_GRID)))
    return min(candidates, key=lambda fit: _loss(surfaces, fit))


def chosen(surfaces: Sequence[Surface]) -> Fit:
    """The best fit, or documented rates where its loss on groups left out is not below theirs."""
    groups = {s.run.group for s in surfaces}
    if len(groups) < 2:
        return DOCUMENTED
    unseen = 0.0
    for group in groups:
        inside = [s for s in surfaces if s.run.group == group]
        unseen += _loss(inside, best_fit([s for s in surfaces if s.run.group != group]))
    return best_fit(surfaces) if unseen < _loss(surfaces, DOCUMENTED) else DOCUMENTED


def _along(grid: tuple[float, float]) -> list[float]:
    low, high = grid
    return [low + (high - low) * n / _STEPS for n in range(_STEPS + 1)]


def _loss(surfaces: Sequence[Surface], fit: Fit) -> float:
    errors = [math.log(s.at(fit) / s.run.step_time_s) / _HUBER for s in surfaces]
    return sum(math.sqrt(1 + e * e) - 1 for e in errors)


def left_out(surfaces: Sequence[Surface]) -> dict[str, float]:
    """Error of every run, by id, with constants chosen by the runs of all other groups."""
    fits = {
        group: chosen([s for s in surfaces if s.run.group != group])
        for group in {s.run.group for s in surfaces}
    }
    return {s.run.id: s.error(fits[s.run.group]) for s in surfaces}


def baseline(runs: Sequence[PublishedRun], peaks: Mapping[str, float]) -> tuple[float, list[float]]:
    """The constant MFU that fits `runs` best, and its error per run. `peaks` are FLOP/s of all
    cores of a run by id. Best in the mean of squared log step times, hence the geometric mean."""
    mfu = [r.model_flops / peaks[r.id] / r.step_time_s for r in runs]
    fitted = math.exp(statistics.fmean(math.log(value) for value in mfu))
    return fitted, [value / fitted - 1 for value in mfu]


_ROWS = "training.csv, primary rows "


def write(fit: Fit, runs: Sequence[PublishedRun], method: str) -> None:
    """Put the values and where they come from into `calibration.toml`. A band that does not hold
    its value is widened to it: the nominal answer lies between the profiles."""
    text = calibration.FILE.read_text()
    before = calibration.constants()
    rows = _ROWS + ", ".join(run.id for run in runs)
    if fit == DOCUMENTED:
        rows, method = "", f"documented rates: better on groups left out than fits to {rows}"
    for name, value in zip((STREAMING, STALL_RECOVERY), astuple(fit), strict=True):
        shown = f"{value:.3f}"
        ends = (*before[name].band, float(shown))
        entries = {
            "value": shown,
            "band": f"[{min(ends)}, {max(ends)}]",
            "method": json.dumps(method),
            "fitted_on": json.dumps(rows),
        }
        for key, entry in entries.items():
            found = re.search(rf"\[{name}\](?:\n(?!\[).*)*?\n{key} = (.*)", text)
            assert found, f"[{name}] has no {key}"
            text = text[: found.start(1)] + entry + text[found.end(1) :]
    calibration.FILE.write_text(text)
    calibration.constants.cache_clear()
