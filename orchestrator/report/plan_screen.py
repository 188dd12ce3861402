"""The screen of `plan`: what fits a terminal, of 24 lines at least, also without colours; what is
no terminal gets everything.

What answers the question is always there, and what decides it (`verdict.py`) is last; what explains
it is cut or left out, least important first, when there is no line for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain

from rich.text import Text

from shardwright.orchestrator.config.config import TRIES
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.sections import Said, Section
from shardwright.orchestrator.report.text import Report
from shardwright.orchestrator.report.tried import short_change, tries_of
from shardwright.orchestrator.terminal import terminal

LINES = 24
WIDTH = 80  # of what is not a terminal
_ALWAYS = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A section, and what it counts: parts of higher numbers are left out first, and of more than
    `most` lines (0: all) the rest is cut."""

    section: Section
    rank: int = _ALWAYS
    most: int = 0


def plan_screen(report: Report) -> None:
    """Print the screen."""
    console = terminal.console()
    size = (console.width, max(LINES, console.height - 1)) if console.is_terminal else (WIDTH, 0)
    for line in screen_lines(report, *size):
        console.print(line, soft_wrap=True)


def screen_lines(report: Report, width: int, room: int = 0) -> list[Text]:
    """Lines of at most `width` columns: all of them, or with `room` at most so many, as far as what
    is always there allows."""
    blocks = [sections.laid(part.section(report), width) for part in _PARTS]
    head = sections.headline(report, width)
    if room:
        _make_room(blocks, room - len(head), width)
    return [*head, *chain.from_iterable(blocks)]


def _make_room(blocks: list[list[Text]], room: int, width: int) -> None:
    """Cut sections, then leave some out, until there are no more lines than `room`."""
    last_first = sorted(range(len(blocks)), key=lambda n: (_PARTS[n].rank, n), reverse=True)
    for n in last_first:
        excess = sum(map(len, blocks)) - room
        if excess > 0 and _PARTS[n].most:
            blocks[n] = _cut(blocks[n], max(_PARTS[n].most, len(blocks[n]) - excess), width)
    for n in last_first:
        if sum(map(len, blocks)) > room and _PARTS[n].rank != _ALWAYS:
            blocks[n] = []


def _cut(lines: list[Text], most: int, width: int) -> list[Text]:
    """At most `most` lines; the last says that there were more."""
    if len(lines) <= most:
        return lines
    last = lines[most - 1].copy()
    last.truncate(width - 3)
    return [*lines[: most - 1], last.append("...")]


def whats_next(report: Report) -> Said:
    """The next things worth trying, each with what it did; what was tried and gains little or
    nothing; that there was no time to try."""
    section = report.get("whatif")
    if not section:
        return
    tried = tries_of(report)
    for title, change, effect in tried:
        yield title, f"{change}: {effect}"
    if section["left"] and len(tried) < TRIES:
        left = "; ".join(map(short_change, section["left"]))
        text = f"not tried, to answer in time (--tries {TRIES}): {left}"
        yield "" if tried else "next", text
    elif not tried:
        yield "next", "nothing known that is worth trying"


def _tool(report: Report) -> Said:
    """How long the answer took, and what took the most of that."""
    made = report["provenance"]
    seconds = made["stages_s"]
    waited_s = made.get("answered_s", sum(seconds.values()))  # only a command knows the whole
    longest = Counter(seconds).most_common(4)
    parts = ", ".join(f"{name} {value:.1f}" for name, value in longest)
    yield "answered", f"in {waited_s:.1f} s: {parts}"


ASKED = (
    Part(sections.job),
    Part(sections.imported, 1, most=4),
    Part(sections.roles, 1, most=2),
    Part(sections.own_step, 1, most=2),
    Part(sections.logical_cores, 2),
    Part(sections.placement, 5),
    Part(sections.streams, 4),
    Part(sections.compiler, 7),
)
"""What was planned or run."""
ANSWERED = (
    Part(sections.memory),
    Part(sections.auto, 1, most=2),
    Part(sections.timing),
    Part(sections.stages, 3),
    Part(sections.rates),
    Part(sections.cost),
    Part(sections.goal),
    Part(sections.goodput, 6),
    Part(sections.faults, 1),
    Part(sections.limited_by, most=2),
    Part(sections.confidence, most=3),
)
"""What it came to."""
_PARTS = (
    *ASKED,
    *ANSWERED,
    Part(whats_next, most=4),
    Part(sections.findings, 2, most=5),
    Part(sections.stored, 6, most=3),
    Part(sections.stored_units, 8, most=3),
    Part(_tool, 8, most=1),
    Part(sections.verdict),
)
