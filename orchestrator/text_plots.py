"""Plots on the terminal, by plotext, without colours of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


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
    for name, (xs, ys) in series.items():
        label = {"label": name} if len(series) > 1 else {}
        kind(plotext)(list(xs), list(ys), marker="braille", **label)
    for axis in log:
        getattr(plotext, f"{axis}scale")("log")
    plotext.xlabel(x)
    plotext.ylabel(y)
    return Text.from_ansi(str(plotext.build()))
