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

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.orchestrator.changes.change import as_chosen
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import Report
from shardwright.orchestrator.terminal.terminal import say_json


@dataclass(frozen=True, slots=True)
class Explanation:
    """A module with `explain(job, report, *given, *arguments)`, which returns the section, and
    `show(section)`; imported when it is asked for. `section` is its key of the report, the word
    itself where that is empty."""

    module: str
    help: str
    arguments: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    section: str = ""


_LINES = {
    "job": "sizes of the step",
    "placed": "where the axes of the mesh lie",
    "auto": "what was tried for the keys that are left to the memory",
    "compiler": "every option of the compiler",
    "rates": "tokens per second, MFU and HFU from their parts",
    "cost": "price of a step and of a million tokens",
    "goal": "days and dollars of a whole training, and what is left of both",
    "goodput": "what failures and checkpoints take",
    "limited": "the shares of the step, or of memory, that limited by names",
    "confidence": "every figure that is assumed, and what no answer tells",
    "next": "every change that was tried, and what it did",
    "warnings": "every finding in full",
    "verdict": "what decides, in full",
}
"""Lines of the screen whose figures are explained one by one."""
EXPLANATIONS: Mapping[str, Explanation] = MappingProxyType(
    {
        "collective": Explanation(
            "explain_collectives",
            "every collective: algorithm and why, bytes, exposed time, other algorithms' times",
        ),
        "fusion": Explanation("explain_fusion", "which kernels the compiler made, and why"),
        "imported": Explanation(
            "explain_imported",
            "every field of `--from`: what it is here, or why it is nothing",
        ),
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
        **{
            word: Explanation("explain_lines", text, given=(word,), section="explained")
            for word, text in _LINES.items()
        },
    }
)


def check(words: Sequence[str]) -> None:
    """Refuse words that nothing explains. Raises UsageError."""
    known = EXPLANATIONS.get(words[0]) if words else None
    if words and (known is None or len(words) > 1 + len(known.arguments)):
        raise UsageError(
            "SW_USAGE",
            f"--explain requires one of {', '.join(_HEADS.values())}, got {' '.join(words)}",
            hint=did_you_mean(words[0], EXPLANATIONS, "put the job file in front of --explain"),
        )


def add(words: Sequence[str], job: JobConfig, report: dict[str, Any]) -> None:
    """Add what is asked for to a report."""
    if words:
        about = EXPLANATIONS[words[0]]
        section = _module(about).explain(as_chosen(job, report), report, *about.given, *words[1:])
        report[about.section or words[0]] = section


def show(
    words: Sequence[str],
    report: Report,
    as_json: bool,
    screen: Callable[[Report], None],
) -> None:
    """The report as JSON, or the screen and below it what was explained."""
    if as_json:
        say_json(report)
        return
    screen(report)
    if words:
        about = EXPLANATIONS[words[0]]
        _module(about).show(report[about.section or words[0]])


def help_text() -> str:
    """What the command says of `--explain`."""
    return "; ".join(f"{_HEADS[name]}: {one.help}" for name, one in EXPLANATIONS.items())


_HEADS = {
    name: " ".join((name, *(f"[{word}]" for word in one.arguments)))
    for name, one in EXPLANATIONS.items()
}
"""The words, each with what may follow it."""


def _module(about: Explanation) -> Any:
    return import_module(f"shardwright.orchestrator.report.{about.module}")
