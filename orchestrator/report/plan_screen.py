"""The screen of `plan`: what fits a terminal of 24 lines and 80 columns, also without colours.

What answers the question is always there; what explains it is left out, least important first,
when there is no line for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.text import Text

from orchestrator import terminal
from orchestrator.report import sections
from orchestrator.report.sections import Report, Section, plain
from orchestrator.report.text import counted, seconds_text, share_text, size_text, usd_text

LINES = 24
WIDTH = 80  # of what is not a terminal
_ALWAYS = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """A section, and what it counts: parts of higher numbers are left out first."""

    lines: Section
    rank: int = _ALWAYS


def plan_screen(report: Report) -> None:
    """Print the screen."""
    console = terminal.console()
    for line in screen_lines(report, console.width if console.is_terminal else WIDTH):
        console.print(line, soft_wrap=True)


def screen_lines(report: Report, width: int) -> list[Text]:
    """At most `LINES` lines of at most `width` columns."""
    blocks = [(part.rank, part.lines(report, width)) for part in _PARTS]
    while sum(len(lines) for _, lines in blocks) > LINES:
        last = max(range(len(blocks)), key=lambda n: blocks[n][0] if blocks[n][1] else -1)
        blocks[last] = (blocks[last][0], [])
    return [line for _, lines in blocks for line in lines]


def next_lines(report: Report, width: int) -> list[Text]:
    """The next things worth trying, each with what it did; what was tried and did not help; or what
    there was no time to try."""
    section = report.get("whatif")
    if not section:
        return []
    lines: list[Text] = []
    for row in section["tried"][:2]:
        title = "next" if row["helps"] else "no gain"
        lines += plain(
            title, f"{_words(row['change'])}: {effect_text(row, counted(report))}", width, most=2
        )
    left = section["left"][: 2 - len(section["tried"])]
    if left:
        names = "; ".join(_words(text) for text in left)
        text = f"not tried, to answer in time: {names} (--tries 2 tries them)"
        lines += plain("" if lines else "next", text, width, most=2)
    return lines or plain("next", "nothing known that is worth trying", width)


def _words(change: str) -> str:
    """A change without the names of tables where they say nothing new."""
    return change.replace("strategy.", "").replace("cluster.", "")


def effect_text(row: Mapping[str, Any], unit: str) -> str:
    """What a try did, per million of a unit: `fits, 1.420 s (-12 %), $2.06/Mtoken (-12 %)`."""
    if row["status"] in ("refused", "failed"):
        return f"{row['code']}, {row['message']}"
    text = f"{row['status']}, {size_text(row['peak_bytes'])}"
    if row["status"] == "does not fit":
        return text
    text = f"fits, {seconds_text(row['step_time_s'])} per step"
    if row["same_batch"]:
        text += f" ({_signed(row['time_change'])})"
    else:
        faster = 1 / (1 + row["time_change"]) - 1
        text += f" of {row['global_batch']:,} samples ({_signed(faster)} {unit}s/s)"
    if row["cost_change"] is not None:
        text += f", {usd_text(row['usd_per_1e6_tokens'])}/M{unit} ({_signed(row['cost_change'])})"
    elif row.get("unpriced"):
        text += ", no price of this kind"
    return text


def _signed(change: float) -> str:
    return f"{'+' if change >= 0 else '-'}{share_text(abs(change))}"


def _tool(report: Report, width: int) -> list[Text]:
    """Where the time of the tool itself went."""
    seconds = report["provenance"]["stages_s"]
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {value:.1f}" for name, value in longest)
    return plain("answered", f"in {sum(seconds.values()):.1f} s: {parts}", width, most=1)


_PARTS = (
    _Part(sections.headline),
    _Part(sections.job),
    _Part(sections.roles, 1),
    _Part(sections.logical_cores, 2),
    _Part(sections.placement, 5),
    _Part(sections.streams, 4),
    _Part(sections.compiler, 7),
    _Part(sections.memory),
    _Part(sections.timing),
    _Part(sections.stages, 3),
    _Part(sections.rates),
    _Part(sections.cost),
    _Part(sections.goal),
    _Part(sections.goodput, 6),
    _Part(sections.faults, 1),
    _Part(sections.limited_by),
    _Part(sections.confidence),
    _Part(next_lines),
    _Part(partial(sections.findings, most=1), 2),
    _Part(sections.stored, 6),
    _Part(sections.stored_units, 8),
    _Part(_tool, 8),
)
