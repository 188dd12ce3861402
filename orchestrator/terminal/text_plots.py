"""Plots on the terminal, by plotext, without colours of their own.

Ticks are round numbers at even distances: an axis begins and ends at one, and has so many rows or
columns that all of them lie in the middle of a cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


_MARKERS = "\u2022x+o*#"
"""Of series side by side; one alone is drawn in braille, which is finer."""
_ROUND = (1.0, 2.0, 2.5, 5.0)  # steps of an axis, and these times powers of ten
_STEPS = (2, 3, 4, 5, 6, 8)  # from tick to tick along x
_SLIP = 1e-9  # of a step: what sums of floats may be off
_MOST_TICKS = 9  # of an axis whose ticks are the values
_FRAME_ROWS, _FRAME_COLUMNS = 4, 2  # of a plot that are no rows and columns of points


@dataclass(frozen=True, slots=True)
class Axis:
    """Where the ticks of an axis are; it begins at the first and ends at the last. A logarithmic
    one has ticks above 0."""

    ticks: Sequence[float]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, as a length."""
        return math.log10(value) if self.is_log else value

    @property
    def steps(self) -> int:
        """From tick to tick, in all."""
        return len(self.ticks) - 1

    @property
    def labels(self) -> list[str]:
        """The ticks with as many decimals as all of them need."""
        digits = next((n for n in range(7) if all(_has_digits(t, n) for t in self.ticks)), None)
        form = ",.6g" if digits is None else f",.{digits}f"
        return [format(tick, form) for tick in self.ticks]


def _has_digits(value: float, digits: int) -> bool:
    return math.isclose(round(value, digits), value, rel_tol=1e-9, abs_tol=1e-12)


def even_axis(values: Sequence[float], counts: Sequence[int]) -> Axis:
    """The axis that is filled best by the values, cut into one of `counts` equal steps."""
    low, high, is_whole = min(values), max(values), all(map(_is_whole, values))
    if low == high:
        high = low + (1.0 if is_whole else abs(low) / 10)
    found = [_filled(low, high, count, is_whole) for count in counts]
    return Axis(min(found, key=lambda ticks: (ticks[-1] - ticks[0], -len(ticks))))


def _is_whole(value: float) -> bool:
    return float(value).is_integer()


def _filled(low: float, high: float, count: int, is_whole: bool) -> list[float]:
    """Ticks around all from `low` to `high`, the closest that are round, or whole as well."""
    steps = _round_steps((high - low) / count)
    fitting = (
        (first, step)
        for step in steps
        if not is_whole or _is_whole(step)
        for first in [math.floor(low / step + _SLIP)]
        if first + count >= high / step - _SLIP
    )
    first, step = next(fitting)
    return [(first + n) * step for n in range(count + 1)]


def _round_steps(least: float) -> Iterator[float]:
    """Round steps from about `least` on."""
    for exponent in itertools.count(math.floor(math.log10(least))):
        for part in _ROUND:
            if (step := part * 10.0**exponent) >= least * (1 - 1e-9):
                yield step


def value_axis(values: Sequence[float], is_log: bool) -> Axis | None:
    """The axis whose ticks are the values, where they are few, whole, and lie at even distances."""
    ticks = sorted(set(values))
    axis = Axis(ticks, is_log)
    places = [axis.at(tick) for tick in ticks]
    apart = {round(b - a, 9) for a, b in itertools.pairwise(places)}
    few = 2 <= len(ticks) <= _MOST_TICKS
    return axis if few and len(apart) == 1 and all(map(_is_whole, ticks)) else None


def decade_axis(values: Sequence[float], counts: Sequence[int]) -> Axis:
    """The logarithmic axis of values above 0: ticks at powers of ten, as many steps apart as one of
    `counts`."""
    first = math.floor(math.log10(min(values)) + 1e-9)
    decades = max(1, math.ceil(math.log10(max(values)) - 1e-9) - first)
    # A step may be several decades, so that there is always one that fits.
    sizes = ((math.ceil(decades / count) * count, -count, count) for count in counts)
    span, _, count = min(sizes)
    return Axis([10.0 ** (first + n * (span // count)) for n in range(count + 1)], is_log=True)


def lines(series: Series, x: str, y: str, width: int = 76, height: int = 9, log: str = "") -> Text:
    """Curves by name; `log` names logarithmic axes."""
    return _drawn(series, "plot", x, y, width, height, log)


def dots(series: Series, x: str, y: str) -> Text:
    """Points by name."""
    return _drawn(series, "scatter", x, y, 76, 13, "")


def _drawn(series: Series, kind: str, x: str, y: str, width: int, height: int, log: str) -> Text:
    import plotext

    series = {name: _numbers(*points) for name, points in series.items()}
    if not any(xs for xs, _ in series.values()):
        return Text(f"{y}: no number to draw")
    plotext.clear_figure()
    plotext.theme("clear")
    across, up = _axes(series, height, log)
    frame = _FRAME_COLUMNS + max(map(len, up.labels))
    columns = (width - frame - 1) // across.steps * across.steps + 1
    plotext.plotsize(columns + frame, height)
    markers = _markers(series)
    for name, (xs, ys) in series.items():
        places = [across.at(value) for value in xs], [up.at(value) for value in ys]
        getattr(plotext, kind)(*places, marker=markers.get(name, "braille"))
    for axis, limits, ticks in (
        (across, plotext.xlim, plotext.xticks),
        (up, plotext.ylim, plotext.yticks),
    ):
        places_of = [axis.at(tick) for tick in axis.ticks]
        limits(places_of[0], places_of[-1])
        ticks(places_of, axis.labels)
    plotext.xlabel(x)
    plotext.ylabel(y)
    # Below the plot: plotext's own legend would lie on the points of a corner.
    legend = "   ".join(f"{marker} {name}" for name, marker in markers.items())
    return Text.from_ansi(str(plotext.build()).rstrip("\n") + (f"\n{legend}" if legend else ""))


def _numbers(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points that can be drawn: the loss of a run that diverged is no number."""
    kept = [pair for pair in zip(xs, ys, strict=True) if all(map(math.isfinite, pair))]
    return [x for x, _ in kept], [y for _, y in kept]


def _axes(series: Series, height: int, log: str) -> tuple[Axis, Axis]:
    """Along and up. Rows are given, so that steps up are those that divide them."""
    xs = [value for points, _ in series.values() for value in points]
    ys = [value for _, points in series.values() for value in points]
    rows = height - _FRAME_ROWS - 1
    up = [count for count in _STEPS if rows % count == 0] or [1]
    across = value_axis(xs, "x" in log) or _axis(xs, _STEPS, "x" in log)
    return across, _axis(ys, up, "y" in log)


def _axis(values: Sequence[float], counts: Sequence[int], is_log: bool) -> Axis:
    return decade_axis(values, counts) if is_log else even_axis(values, counts)


def _markers(series: Series) -> dict[str, str]:
    """What stands for which series, where there are several."""
    found = dict(zip(series, itertools.cycle(_MARKERS), strict=False))
    return found if len(found) > 1 else {}
