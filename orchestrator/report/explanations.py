"""`--explain WHAT` of `run` and `plan`: what there is to explain, who explains it, and how it is
shown.

An explanation is a section of the report under its own name, and tables below the screen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from compiler.diagnostics import UsageError, did_you_mean
from orchestrator.config import JobConfig
from orchestrator.strict_json import dumps
from orchestrator.terminal import say


@dataclass(frozen=True, slots=True)
class Explanation:
    """A module with `explain(job, report, *arguments)`, which returns the section, and
    `show(section)`; imported when it is asked for."""

    module: str
    help: str
    arguments: tuple[str, ...] = ()


EXPLANATIONS: Mapping[str, Explanation] = MappingProxyType(
    {
        "collective": Explanation(
            "explain_collectives",
            "every collective: algorithm and why, bytes, exposed time, other algorithms' times",
        ),
        "fusion": Explanation("explain_fusion", "which regions the compiler made, and why"),
        "memory": Explanation("memory_report", "what is live when, and what would save"),
        "sensitivity": Explanation(
            "explain_sensitivity", "how far every figure of the machine moves the step"
        ),
        "sharding": Explanation(
            "explain_sharding",
            "who decided where tensors lie, and why collectives are there",
            ("TENSOR",),
        ),
        "time": Explanation("explain_time", "where every picosecond goes, by function and line"),
    }
)


def check(words: Sequence[str]) -> None:
    """Refuse words that nothing explains. Raises UsageError."""
    known = EXPLANATIONS.get(words[0]) if words else None
    if words and (known is None or len(words) > 1 + len(known.arguments)):
        names = ", ".join(" ".join((n, *(f"[{a}]" for a in e.arguments))) for n, e in _ITEMS)
        raise UsageError(
            "SW_USAGE",
            f"--explain requires one of {names}, got {' '.join(words)}",
            None,
            did_you_mean(words[0], EXPLANATIONS, "put the job file in front of --explain"),
        )


def add(words: Sequence[str], job: JobConfig, report: dict[str, Any]) -> None:
    """Add what is asked for to a report."""
    if words:
        report[words[0]] = _module(words[0]).explain(job, report, *words[1:])


def show(
    words: Sequence[str],
    report: dict[str, Any],
    as_json: bool,
    screen: Callable[[dict[str, Any]], None],
) -> None:
    """The report as JSON, or the screen and below it what was explained."""
    if as_json:
        say(dumps(report, indent=1))
        return
    screen(report)
    if words:
        _module(words[0]).show(report[words[0]])


def help_text() -> str:
    """What the command says of `--explain`."""
    return "; ".join(
        " ".join((name, *(f"[{a}]" for a in one.arguments))) + f": {one.help}"
        for name, one in _ITEMS
    )


_ITEMS = tuple(EXPLANATIONS.items())


def _module(name: str) -> Any:
    return import_module(f"orchestrator.report.{EXPLANATIONS[name].module}")
