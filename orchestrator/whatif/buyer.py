"""Which of the points compared meets a goal: dollars and days of every row, at one kind of price,
and the cheapest and the fastest of those that meet it, or what is nearest and what it lacks.

Rows are stored without either, so that the same rows answer any goal at any price.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.cost import (
    basis_text,
    cost_section,
    list_text,
    missing_text,
    price_of,
)
from shardwright.orchestrator.report.goal import (
    answer,
    limits_text,
    needs_text,
    shortfall,
    took_text,
)
from shardwright.orchestrator.report.text import Facts, usd_text
from shardwright.orchestrator.report.tried import FITS
from shardwright.orchestrator.whatif.rows import Row

Answered = tuple[Row, Facts]
_NEEDED = ("target", "instances", "step_time_s", "tokens_per_step")


def check_prices(host: JobConfig, machines: Iterable[str]) -> None:
    """Prices of one's own are of machines that are compared. Raises UsageError."""
    compared = list(dict.fromkeys(machines))
    others = [name for name, _ in host.price.usd_per_hour if name not in compared]
    if others:
        raise UsageError(
            "SW_PRICE",
            f"price.usd_per_hour requires machines that are compared ({', '.join(compared)}), got"
            f" {others[0]}",
            hint="name them: --price " + ",".join(f"{name}=..." for name in compared),
        )


def bought(row: Row, host: JobConfig) -> Row:
    """A row with its dollars and, where there is a goal, what that takes; `host` says at which
    price, and which goal."""
    if not all(row.metrics.get(name) for name in _NEEDED):  # refused, or without a time
        return row
    m, price = row.metrics, _price(row, host)
    cost = cost_section(price, m["instances"], m["step_time_s"], m["tokens_per_step"])
    found = replace(row, metrics={**m, **cost, "price_kind": price["kind"]})
    if not host.goal.tokens or not m.get("goodput"):  # inference has no goal
        return found
    took = _answer(found, host)
    figures = {name: took[name] for name in ("days", "usd", "slack_days", "slack_usd")}
    return replace(found, metrics={**found.metrics, **figures})


def _price(row: Row, host: JobConfig) -> Facts:
    name = row.metrics["target"]
    return price_of(load_target(name), name, host.price)


def _answer(row: Row, host: JobConfig) -> Facts:
    m = row.metrics
    return answer(
        host.goal,
        tokens_per_step=m["tokens_per_step"],
        step_s=m["step_time_s"],
        goodput=m["goodput"],
        instances=m["instances"],
        usd_per_hour=m["usd_per_hour"],
        fits=row.status == FITS,
    )


def prices_section(rows: Sequence[Row], host: JobConfig) -> list[Facts]:
    """The price of every machine among rows, as documents have it."""
    told = [row for row in rows if "price_kind" in row.metrics]
    return list({row.metrics["target"]: _price(row, host) for row in told}.values())


def prices_text(prices: Sequence[Facts]) -> str:
    """What dollars are of, machine by machine: its price, or that it has none of that kind."""
    return "; ".join(
        missing_text(price)
        if price["usd_per_hour"] is None
        else f"{price['machine']} {usd_text(price['usd_per_hour'])} per hour {list_text(price)}"
        for price in prices
    )


def goal_section(rows: Sequence[Row], host: JobConfig) -> Facts | None:
    """The goal, which rows meet it best, by their keys, and that in sentences; None without one."""
    if not host.goal.tokens:
        return None
    fitting = [row for row in rows if row.status == FITS and not row.code]
    found = [(row, _answer(row, host)) for row in fitting if row.metrics.get("days") is not None]
    unasked = not (host.goal.deadline or host.goal.budget)
    meeting = [(row, one) for row, one in found if one["met"] or unasked]
    missing = [(row, one) for row, one in found if one["met"] is False]
    priced = [(row, one) for row, one in meeting if one["usd"] is not None]
    best = {
        "cheapest": min(priced, key=lambda f: (f[1]["usd"], f[1]["days"]), default=None),
        "fastest": min(meeting, key=lambda f: (f[1]["days"], f[1]["usd"] or 0.0), default=None),
        "nearest": None if meeting else min(missing, key=lambda f: shortfall(f[1]), default=None),
    }
    return {
        "tokens": host.goal.tokens,
        "deadline_s": host.goal.deadline or None,
        "budget_usd": host.goal.budget or None,
        **{name: dict(one[0].values) if one else None for name, one in best.items()},
        "text": list(_texts(best, found, host)),
    }


def _texts(
    best: Mapping[str, Answered | None], found: Sequence[Answered], host: JobConfig
) -> Iterable[str]:
    """The goal in a line, then a line for each of the best."""
    yield f"goal: {limits_text(host.goal)}"
    cheapest, fastest, nearest = best["cheapest"], best["fastest"], best["nearest"]
    if cheapest and fastest and cheapest[0] is fastest[0]:
        yield _text("cheapest and fastest that meets it", cheapest, host)
    else:
        for name in ("cheapest", "fastest"):
            if (one := best[name]) is not None:
                yield _text(f"{name} that meets it", one, host)
    if nearest is not None:
        yield _text("no point meets it; nearest", nearest, host)
    elif not fastest:
        yield "no point can be held to it" if found else "no point fits, so none meets it"
    if unpriced := [row for row, one in found if one["usd"] is None]:
        which = "point has" if len(unpriced) == 1 else "points have"
        yield f"{len(unpriced)} {which} no price of this kind, and so no dollars to compare"


def _text(title: str, found: Answered, host: JobConfig) -> str:
    row, one = found
    basis = basis_text(_price(row, host))
    name = " ".join(f"{key}={value}" for key, value in row.values.items())
    needs = needs_text(one["needs"], "token")
    told = f"{title}: {name}: {took_text(one, basis)}"
    return f"{told}; it needs {needs}" if needs else told
