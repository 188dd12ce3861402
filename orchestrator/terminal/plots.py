"""Pictures in files, with matplotlib: the only module that imports it (extra `plot`).

The same data gives the same SVG: no dates, and ids from a fixed salt.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Heat:
    """A grid of figures, None where there is none; `texts` are what cells say."""

    title: str
    x: tuple[str, Sequence[str]]  # name, labels
    y: tuple[str, Sequence[str]]
    cells: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Cloud:
    """Points in two figures; those of the front are joined and labelled."""

    x: str
    y: str
    points: Sequence[tuple[float, float]]
    front: Sequence[tuple[float, float]] = ()
    labels: Sequence[str] = ()  # of the front


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line over the same axis as others, with a band where it has one."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None
    ideal: bool = False  # dashed: what it is compared with


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over the number of instances."""

    title: str
    y: str
    curves: Sequence[Curve]
    log: str = "x"  # or "xy"
    share: bool = False  # y is a share


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def _figure(
    paths: Sequence[Path], columns: int = 1, size: tuple[float, float] = (7, 5)
) -> Iterator[Any]:
    """Axes to draw on; the figure is written to every path, as its suffix says."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": "shardwright"}):
        figure, axes = plt.subplots(
            1, columns, figsize=(size[0] * columns, size[1]), layout="constrained", squeeze=False
        )
        yield axes[0]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {}, dpi=110)
        plt.close(figure)


def _paths(stem: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    return [stem.parent / f"{stem.name}{suffix}" for suffix in suffixes]


def heat_map(heat: Heat, stem: Path) -> list[Path]:
    """Draw a heat map, in which cells without a figure stay empty; the files."""
    paths = _paths(stem)
    (x_name, x_labels), (y_name, y_labels) = heat.x, heat.y
    size = (2.5 + 0.9 * len(x_labels), 1.8 + 0.55 * len(y_labels))
    with _figure(paths, size=size) as (axes,):
        values = [[float("nan") if c is None else c for c in row] for row in heat.cells]
        image = axes.imshow(values, cmap="viridis", aspect="auto")
        for row, texts in enumerate(heat.texts):
            for column, text in enumerate(texts):
                colour = _readable(image, values[row][column])
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(x_labels)), x_labels)
        axes.set_yticks(range(len(y_labels)), y_labels)
        axes.set(xlabel=x_name, ylabel=y_name)
        axes.set_title(heat.title, fontsize=10)
    return paths


def _readable(image: Any, value: float) -> str:
    """Black on light cells and on empty ones, white on dark ones."""
    if math.isnan(value):
        return "black"
    red, green, blue, _ = image.cmap(image.norm(value))
    # Luma of ITU-R BT.601.
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def scatter(clouds: Sequence[Cloud], stem: Path) -> list[Path]:
    """Draw clouds of points beside each other, each with its Pareto front; the files."""
    paths = _paths(stem)
    with _figure(paths, columns=len(clouds)) as all_axes:
        for cloud, axes in zip(clouds, all_axes, strict=True):
            axes.plot(*columns(cloud.points), "o", alpha=0.45, color="tab:blue", label="fits")
            axes.plot(*columns(cloud.front), "o-", color="tab:red", label="not beaten in both")
            for point, label in zip(cloud.front, cloud.labels, strict=True):
                _label(axes, point, label)
            axes.set(xlabel=cloud.x, ylabel=cloud.y)
            axes.set_title(f"{cloud.y} against {cloud.x}", fontsize=10)
            axes.grid(alpha=0.3)
            axes.margins(0.1)
            axes.legend(fontsize=8)
    return paths


def _label(axes: Any, point: tuple[float, float], text: str) -> None:
    low, high = axes.get_xlim()
    side = "left" if point[0] < (low + high) / 2 else "right"
    offset = (5, 5) if side == "left" else (-5, 5)
    axes.annotate(text, point, offset, textcoords="offset points", fontsize=7, ha=side)


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Points as their two figures."""
    return [x for x, _ in points], [y for _, y in points]


def curves(panels: Sequence[Panel], stem: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Draw panels of curves beside each other, a curve in one colour in all of them; the files."""
    paths = _paths(stem, suffixes)
    names = dict.fromkeys(c.name for panel in panels for c in panel.curves if not c.ideal)
    colours: Mapping[str, str] = {name: f"C{number}" for number, name in enumerate(names)}
    with _figure(paths, columns=len(panels), size=(5.5, 4.5)) as all_axes:
        for panel, axes in zip(panels, all_axes, strict=True):
            for curve in panel.curves:
                _draw(axes, curve, colours.get(curve.name, "grey"))
            for axis in panel.log:
                getattr(axes, f"set_{axis}scale")("log", base=2 if axis == "x" else 10)
            axes.xaxis.set_major_formatter("{x:g}")
            if panel.share:
                axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
            axes.set(xlabel="instances", ylabel=panel.y)
            axes.set_title(panel.title, fontsize=10)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    return paths


def _draw(axes: Any, curve: Curve, colour: str) -> None:
    style = "--" if curve.ideal else "o-"
    axes.plot(curve.x, curve.y, style, color=colour, label=curve.name, markersize=4)
    if curve.band:
        axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.15)
