"""Bars of text whose pieces sum to the whole, cell by cell.

Every piece has a fill of its own besides its colour, so that a bar says the same without colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white", "bright_cyan")
FILLS = ("█", "▓", "▒", "░", "▚", "▤", "▥", "▦")
EMPTY, LIMIT = "·", "│"


def apportioned(parts: Sequence[float], whole: int) -> list[int]:
    """Whole numbers in proportion to `parts`, which sum to `whole` (by largest remainders)."""
    total = sum(parts)
    if not total:
        return [0] * len(parts)
    exact = [part * whole / total for part in parts]
    found = [int(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda n: (found[n] - exact[n], n))
    for n in by_remainder[: whole - sum(found)]:
        found[n] += 1
    return found


def bar(parts: Mapping[str, float], width: int) -> Text:
    """One bar of `width` cells, a piece per part."""
    text = Text(no_wrap=True)
    for n, cells in enumerate(apportioned(list(parts.values()), width)):
        text.append(FILLS[n % len(FILLS)] * cells, style=COLOURS[n % len(COLOURS)])
    return text


def bar_to_limit(parts: Mapping[str, float], limit: float, width: int) -> Text:
    """As `bar`, on a scale that has the limit too: what is free is dotted, a mark stands where the
    limit is passed."""
    used = sum(parts.values())
    cells = round(width * used / limit)
    if used <= limit:
        return bar(parts, cells).append(EMPTY * (width - cells), style="dim")
    text, at = bar(parts, width - 1), round((width - 1) * limit / used)
    return Text.assemble(text[:at], (LIMIT, "bold"), text[at:], no_wrap=True)


def legend(parts: Mapping[str, str]) -> list[Text]:
    """`fill name value` for every part of a bar, in its order."""
    return [
        Text.assemble((FILLS[n % len(FILLS)], COLOURS[n % len(COLOURS)]), f" {name} {value}")
        for n, (name, value) in enumerate(parts.items())
    ]
