"""Numbers of a report in words."""

from __future__ import annotations

from typing import Any

from shardwright.compiler.machine.target import PS_PER_S
from shardwright.orchestrator.report.cost import list_text, missing_text
from shardwright.orchestrator.report.text import Report, count_text, seconds_text, usd_text


def ps_text(ps: float) -> str:
    """A time in the unit that reads best."""
    return seconds_text(ps / PS_PER_S) if ps else "0"


def flops_text(number: float) -> str:
    """Operations: 18.2 GFLOP."""
    return f"{count_text(number)}FLOP" if number else "0"


def dollars(amount: float | None) -> str:
    """A price."""
    return "no price" if amount is None else usd_text(amount)


def price_told(report: Report) -> str:
    """What kind of price dollars are of, with its list, or that there is none."""
    price = report.get("price")
    none = report["cost"]["usd_per_hour"] is None
    return missing_text(price) if none else list_text(price)


def plain(value: Any) -> str:
    """A value of a configuration as it is written in a job file."""
    if isinstance(value, bool):
        return str(value).lower()
    if value in ("", None):
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key}={plain(one)}" for key, one in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value)
