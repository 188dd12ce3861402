"""Pictures of a sweep: Pareto fronts and heat maps in files, when matplotlib is there, and one
front on the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from rich.console import Console

from shardwright.orchestrator.report.tried import FITS
from shardwright.orchestrator.terminal import plots, text_plots
from shardwright.orchestrator.whatif.rows import METRICS, Metric, Row, Values, ordered, pareto
from shardwright.orchestrator.whatif.table import short_names

MOST_MAPS = 6
"""Pairs of keys that get a heat map, those given first (our choice)."""


def write(
    folder: Path, rows: Sequence[Row], objective: Metric, varied: Sequence[str]
) -> list[Path]:
    """`pareto` and `heat-KEY-KEY`, as SVG and PNG; what was written, nothing without matplotlib."""
    fitting = [row for row in rows if row.status == FITS]
    if not (fitting and plots.available()):
        return []
    paths = plots.scatter(_clouds(fitting, varied), folder / "pareto")
    for heat, names in _heats(rows, objective, varied):
        paths += plots.heat_map(heat, folder / f"heat-{'-'.join(names)}")
    return paths


def show(console: Console, rows: Sequence[Row]) -> None:
    """Memory against time of what fits, with the points that nothing beats in both."""
    x, y = _time(rows), METRICS["peak_gib"]
    fitting = _xy([row for row in rows if row.status == FITS], x, y)
    if len(set(fitting)) < 3:  # nothing to see
        return
    front = _xy(pareto(rows, x, y), x, y)
    series = {"fits": plots.columns(fitting), "not beaten in both": plots.columns(front)}
    console.print(text_plots.dots(series, x.label, y.label))


def _time(rows: Sequence[Row]) -> Metric:
    """Seconds of a step where all steps have the same tokens, else tokens per second: columns of
    the table both."""
    tokens = {row.metrics["tokens_per_step"] for row in rows if row.metrics}
    return METRICS["step_time_s" if len(tokens) == 1 else "tokens_per_s"]


def _clouds(rows: Sequence[Row], varied: Sequence[str]) -> list[plots.Cloud]:
    time = _time(rows)
    short = {n: s for n, s in short_names(varied).items() if len(_values(rows, n)) > 1}
    found = []
    for name in ("usd_per_1e6_tokens", "peak_gib"):
        metric = METRICS[name]
        points, front = _xy(rows, time, metric), pareto(rows, time, metric)
        if not points:  # no price is published for the machine
            continue
        labels = [
            " ".join(f"{s}={row.values[n]}" for n, s in short.items() if n in row.values)
            for row in front
        ]
        ends = _xy(front, time, metric)
        found.append(plots.Cloud(time.label, metric.label, points, ends, labels))
    return found


def _xy(rows: Sequence[Row], x: Metric, y: Metric) -> list[tuple[float, float]]:
    pairs = ((x.of(row), y.of(row)) for row in rows)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _heats(
    rows: Sequence[Row], metric: Metric, varied: Sequence[str]
) -> list[tuple[plots.Heat, tuple[str, str]]]:
    """A map per pair of keys with several values: in each cell the best over all other keys."""
    values = {name: _values(rows, name) for name in varied}
    several = [name for name in varied if len(values[name]) > 1]
    short = short_names(varied)
    found = []
    for y, x in itertools.islice(itertools.combinations(several, 2), MOST_MAPS):
        best = [[_best(rows, metric, {y: b, x: a}) for a in values[x]] for b in values[y]]
        heat = plots.Heat(
            f"{metric.label}, best of what fits",
            (short[x], values[x]),
            (short[y], values[y]),
            [[metric.of(row) if _fits(row) else None for row in line] for line in best],
            [
                [metric.text(row) if _fits(row) else row.status if row else "" for row in line]
                for line in best
            ],
        )
        found.append((heat, (short[y], short[x])))
    return found


def _values(rows: Sequence[Row], name: str) -> list[str]:
    """Values of a key among rows: numbers in their order, others as they were given."""
    found = list(dict.fromkeys(row.values[name] for row in rows if name in row.values))
    try:
        return sorted(found, key=float)
    except ValueError:
        return found


def _best(rows: Sequence[Row], metric: Metric, values: Values) -> Row | None:
    own = [row for row in rows if values.items() <= row.values.items()]
    return next(iter(ordered(own, metric)), None)


def _fits(row: Row | None) -> TypeGuard[Row]:
    return row is not None and row.status == FITS
