"""A line chart on two logarithmic axes as SVG text, with bands; nothing but the standard library.

Coordinates are pixels from the top left corner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 480, 80, 210, 40, 60
COLOURS = ("#1b6ca8", "#c1440e", "#2e7d32", "#6a3d9a", "#8d6e00", "#455a64")


@dataclass(frozen=True)
class Series:
    """Points (x, y) above 0; `band` are (x, low, high)."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False
    colour: int = 0


class Scale:
    """A logarithmic axis from data to pixels."""

    def __init__(self, values: Iterable[float], base: int, start: float, end: float) -> None:
        logs = [math.log(v, base) for v in values]
        self.base, self.start, self.end = base, start, end
        self.low, self.high = math.floor(min(logs) + 1e-9), math.ceil(max(logs) - 1e-9)
        self.high = max(self.high, self.low + 1)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        part = (math.log(value, self.base) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Powers of the base."""
        return [float(self.base**n) for n in range(self.low, self.high + 1)]


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """The chart."""
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    ys += [y for s in series for _, low, high in s.band for y in (low, high)]
    across = Scale(xs, 2, LEFT, WIDTH - RIGHT)
    up = Scale(ys, 10, HEIGHT - BOTTOM, TOP)
    body = [*_axes(across, up, x_label, y_label), _text(LEFT, 24, title, 16, "start")]
    body += [_band(s, across, up) for s in series if s.band]
    body += [part for s in series for part in _line(s, across, up)]
    body += [part for n, s in enumerate(series) for part in _legend(n, s)]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


def _axes(across: Scale, up: Scale, x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(_text(x, bottom + 18, f"{tick:g}", 12, "middle"))
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:,g}", 12, "end"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 16, x_label, 13, "middle"))
    turned = f'transform="rotate(-90 18 {HEIGHT / 2})"'
    middle = f'x="18" y="{HEIGHT / 2}" font-size="13" text-anchor="middle"'
    return [*parts, f"<text {middle} {turned}>{escape(y_label)}</text>"]


def _text(x: float, y: float, text: str, size: int, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {where}>{escape(text)}</text>"


def _path(points: Sequence[tuple[float, float]], across: Scale, up: Scale) -> str:
    return "L".join(f"{across.at(x):.1f} {up.at(y):.1f}" for x, y in points)


def _band(series: Series, across: Scale, up: Scale) -> str:
    low = [(x, y) for x, y, _ in series.band]
    high = [(x, y) for x, _, y in reversed(series.band)]
    colour = COLOURS[series.colour]
    return f'<path d="M{_path([*low, *high], across, up)}Z" fill="{colour}" fill-opacity="0.15"/>'


def _line(series: Series, across: Scale, up: Scale) -> list[str]:
    colour = COLOURS[series.colour]
    dash = ' stroke-dasharray="6 4"' if series.dashed else ""
    path = f'<path d="M{_path(series.points, across, up)}" fill="none" stroke="{colour}"'
    dots = [
        f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3" fill="{colour}"/>'
        for x, y in ([] if series.dashed else series.points)
    ]
    return [f'{path} stroke-width="2"{dash}/>', *dots]


def _legend(number: int, series: Series) -> list[str]:
    x, y = WIDTH - RIGHT + 16, TOP + 12 + 22 * number
    dash = ' stroke-dasharray="6 4"' if series.dashed else ""
    stroke = f'stroke="{COLOURS[series.colour]}" stroke-width="2"{dash}'
    return [f'<path d="M{x} {y}h26" {stroke}/>', _text(x + 32, y + 4, series.name, 12, "start")]
