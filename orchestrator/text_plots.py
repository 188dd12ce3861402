"""Plots on the terminal, by plotext, without colours of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


_MARKERS = "\u2022x+o*#"
"""Of series side by side; one alone is drawn in braille, which is finer."""


def lines(series: Series, x: str, y: str, width: int = 76, height: int = 9, log: str = "") -> Text:
    """Curves by name; `log` names logarithmic axes."""
    return _drawn(series, lambda plotext: plotext.plot, x, y, width, height, log)


def dots(series: Series, x: str, y: str, width: int = 76, height: int = 12) -> Text:
    """Points by name."""
    return _drawn(series, lambda plotext: plotext.scatter, x, y, width, height, "")


def _drawn(
    series: Series, kind: Callable[[Any], Any], x: str, y: str, width: int, height: int, log: str
) -> Text:
    import plotext

    plotext.clear_figure()
    plotext.plotsize(width, height)
    plotext.theme("clear")
    markers = _markers(series)
    for name, (xs, ys) in series.items():
        kind(plotext)(list(xs), list(ys), marker=markers.get(name, "braille"))
    for axis in log:
        getattr(plotext, f"{axis}scale")("log")
    plotext.xlabel(x)
    plotext.ylabel(y)
    # Below the plot: plotext's own legend would lie on the points of a corner.
    legend = "   ".join(f"{marker} {name}" for name, marker in markers.items())
    return Text.from_ansi(str(plotext.build()).rstrip("\n") + (f"\n{legend}" if legend else ""))


def _markers(series: Series) -> dict[str, str]:
    """What stands for which series, where there are several."""
    found = dict(zip(series, itertools.cycle(_MARKERS), strict=False))
    return found if len(found) > 1 else {}
