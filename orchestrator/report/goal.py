"""The buyer's question: so many tokens, by when, for how much, and what would have to change.

Failures and checkpoints are in every figure: a step takes its time over the goodput. The answer
follows from a handful of figures of a plan, so that a report and a row of a sweep have the same,
and a stored plan answers any goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from shardwright.compiler.machine.target import Target
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.purchase import GoalConfig
from shardwright.orchestrator.report.cost import S_PER_HOUR, basis_text, cost_section, price_of
from shardwright.orchestrator.report.text import (
    Facts,
    Report,
    count_text,
    counted,
    large_usd_text,
    long_text,
    share_text,
    usd_text,
)
from shardwright.orchestrator.report.verdict import refusals

S_PER_DAY = 24 * S_PER_HOUR
_LEAST_GOODPUT = 1e-9  # our choice: below, failures leave no time for steps
_ROUNDING = 1e-12  # our choice: what a few operations lose is less


def answer(
    goal: GoalConfig,
    *,
    tokens_per_step: int,
    step_s: float,
    goodput: float,
    instances: int,
    usd_per_hour: float | None,
    fits: bool,
) -> Facts:
    """How long and for how much a job that gets on like that takes (`usd_per_hour` of all
    instances), and how much of both is left (below 0: missing). None is what nobody asked for, or
    what cannot be said: dollars without a price, days of a job that never gets on. `met` is None
    where nothing is asked, or where a budget has no price to be held to.

    `needs` is what would meet a goal that is missed, each by itself but for the price, which goes
    with the instances where both are there: so many times the speed on these instances; that many
    instances that are as efficient (for the deadline), and at most that price of one (for the
    budget); or so many tokens at most.
    """
    steps = -(-goal.tokens // tokens_per_step)
    days = steps * step_s / goodput / S_PER_DAY if goodput > _LEAST_GOODPUT else None
    usd = None if days is None or usd_per_hour is None else days * 24 * usd_per_hour
    deadline_s, budget = goal.deadline or None, goal.budget or None
    slack_days, slack_usd = _less(_days(deadline_s), days), _less(budget, usd)
    late, over = (slack is not None and slack < 0 for slack in (slack_days, slack_usd))
    met: bool | None = None
    if not fits or days is None or late or over:
        met = False
    elif (deadline_s or budget) and (budget is None or usd is not None):
        met = True
    needs = None
    if late or over:
        time, money = _times(days, _days(deadline_s)), _times(usd, budget)
        each = (usd_per_hour or 0.0) / instances
        needs = {
            "speedup": max(time, money),
            "instances": _up(instances * time) if late else None,
            "usd_per_instance_hour": each / money if over else None,
            "tokens": _down(steps / max(time, money)) * tokens_per_step,
        }
    return {
        "tokens": goal.tokens,
        "deadline_s": deadline_s,
        "budget_usd": budget,
        "steps": steps,
        "goodput": goodput,
        "days": days,
        "usd": usd,
        "slack_days": slack_days,
        "slack_usd": slack_usd,
        "fits": fits,
        "met": met,
        "needs": needs,
    }


def shortfall(found: Facts) -> float:
    """How many times as long, or as dear, as it may be, whichever is more: above 1 it is missed."""
    return max(_shares(found))


def _shares(found: Facts) -> tuple[float, float]:
    """What is taken of the time, and of the money, that there is."""
    time = _times(found["days"], _days(found["deadline_s"]))
    return time, _times(found["usd"], found["budget_usd"])


def _up(number: float) -> int:
    """The next whole number, but for what floating point adds to one."""
    return math.ceil(number * (1 - _ROUNDING))


def _down(number: float) -> int:
    return math.floor(number * (1 + _ROUNDING))


def _days(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / S_PER_DAY


def _less(limit: float | None, taken: float | None) -> float | None:
    return None if limit is None or taken is None else limit - taken


def _times(taken: float | None, limit: float | None) -> float:
    return 0.0 if limit is None or taken is None else taken / limit


def limits_text(goal: GoalConfig) -> str:
    """A goal in a few words: `1 T tokens within 30 days for at most $2 M`."""
    text = f"{count_text(goal.tokens).strip()} tokens"
    text += f" within {long_text(goal.deadline)}" if goal.deadline else ""
    return text + (f" for at most {large_usd_text(goal.budget)}" if goal.budget else "")


def doubts(report: Report) -> str:
    """What speaks against an answer: the vendor's compiler, and the slow end of the band where it
    misses the goal, with the instances that it needs; empty where nothing does."""
    found, timing = report["goal"], report["timing"]
    told = []
    if codes := refusals(report):
        told.append(f"neuronx-cc would refuse this step, {', '.join(codes)}")
    slow = timing["band_s"][1] / timing["step_time_s"]
    times, dear = (share * slow for share in _shares(found))
    if slow > 1 and (times > 1 or dear > 1):
        text = f"at the slow end of the band it takes {long_text(found['days'] * slow * S_PER_DAY)}"
        if not found["met"] and times > 1:
            count = _up(report["job"]["cluster"]["instances"] * times)
            text += f", and {count:,} instances to be in time"
        told.append(text)
    return "; ".join(told)


def rests_on(report: Report) -> str:
    """Why what a goal needs is reckoned from a step that nobody can run; empty where one can."""
    told = [] if report["goal"]["fits"] else ["does not fit the memory"]
    if refusals(report):
        told.append("neuronx-cc would refuse")
    return f"each rests on this step, which {' and which '.join(told)}" if told else ""


def goal_texts(
    found: Facts, unit: str, basis: str, doubt: str = "", rests: str = ""
) -> tuple[str, str]:
    """An answer in a sentence, and what would have to change, empty where nothing has to. `basis`
    is the kind of price, `unit` what is counted, `doubt` what speaks against it, `rests` what is
    wrong with the step that what it needs is reckoned from."""
    amount = f"{count_text(found['tokens']).strip()} {unit}s"
    if found["days"] is None:
        return f"not met: failures leave no time for steps, {amount} are never reached", ""
    is_asked = found["deadline_s"] is not None or found["budget_usd"] is not None
    verdict = {True: "met: ", False: "not met: ", None: "open: " if is_asked else ""}[found["met"]]
    text = f"{verdict}{amount} in {took_text(found, basis)}"
    against = [] if found["fits"] else ["the step does not fit the memory"]
    against += [doubt] if doubt else []
    if against:
        text += f"; {'and' if found['needs'] else 'but'} {'; and '.join(against)}"
    needs = needs_text(found["needs"], unit)
    return text, f"{needs}; {rests}" if needs and rests else needs


def told(report: Report) -> tuple[str, str]:
    """As `goal_texts`, of a report that has a goal."""
    basis = basis_text(report.get("price"))
    return goal_texts(report["goal"], counted(report), basis, doubts(report), rests_on(report))


def took_text(found: Facts, basis: str) -> str:
    """How long, for how much, and how much of the time and of the money is left or missing."""
    text = f"{long_text(found['days'] * S_PER_DAY)} at a goodput of"
    text += f" {share_text(found['goodput'], digits=1)}"
    if found["usd"] is not None:
        text += f" for {large_usd_text(found['usd'])} {basis}"
    told = ", ".join(_slack_texts(found))
    return f"{text}; {told}" if told else text


def goal_rows(found: Facts) -> list[tuple[str, str, str, str]]:
    """An answer as rows: what is taken, the limit, and what is left; a dash where there is none."""

    def row(name: str, taken: Any, limit: Any, left: Any, text: Callable[[float], str]) -> Any:
        minus = "-" if left is not None and left < 0 else ""
        rest = "-" if left is None else f"{minus}{text(abs(left))}"
        return name, *("-" if one is None else text(one) for one in (taken, limit)), rest

    limit = _days(found["deadline_s"])
    return [
        row("time", found["days"], limit, found["slack_days"], lambda n: long_text(n * S_PER_DAY)),
        row("money", found["usd"], found["budget_usd"], found["slack_usd"], large_usd_text),
    ]


def _slack_texts(found: Facts) -> Iterator[str]:
    if (slack := found["slack_days"]) is not None:
        amount = long_text(abs(slack) * S_PER_DAY)
        yield f"{amount} {'before' if slack >= 0 else 'after'} the deadline"
    if (slack := found["slack_usd"]) is not None:
        yield f"{large_usd_text(abs(slack))} {'below' if slack >= 0 else 'above'} the budget"
    elif found["budget_usd"] is not None:
        yield "no price to hold against the budget"


def needs_text(needs: Facts | None, unit: str) -> str:
    """What is missing, every figure rounded to the side that suffices."""
    if needs is None:
        return ""
    ways = [f"{_up(needs['speedup'] * 100) / 100:.2f} times the speed on these instances"]
    more = []
    if needs["instances"] is not None:
        more.append(f"{needs['instances']:,} instances at this efficiency")
    if needs["usd_per_instance_hour"] is not None:
        cents = _down(needs["usd_per_instance_hour"] * 100) / 100
        more.append(f"at most {usd_text(cents)} per instance hour")
    ways.append(" and ".join(more))
    if needs["tokens"]:
        least = 10 ** max(0, len(str(needs["tokens"])) - 3)  # of three digits
        count = count_text(needs["tokens"] // least * least).strip()
        ways.append(f"at most {count} {unit}s")
    return ", or ".join(ways)


def bought(report: Report, job: JobConfig, target: Target) -> dict[str, Any]:
    """A report with the dollars and the answer that `job` asks for: of a stored plan, those that
    its last question asked for go."""
    cluster, batch, step_s = job.cluster, report["batch"], report["timing"]["step_time_s"]
    tokens = batch["global_batch"] * batch["tokens_per_sample"]
    price = price_of(target, cluster.target, job.price)
    asked = {name: job.as_dict()[name] for name in ("goal", "price")}
    cost = cost_section(price, cluster.instances, step_s, tokens)
    found = {**report, "job": {**report["job"], **asked}, "price": price, "cost": cost}
    found.pop("goal", None)
    if job.goal.tokens:
        found["goal"] = answer(
            job.goal,
            tokens_per_step=tokens,
            step_s=step_s,
            goodput=report["goodput"]["goodput"],
            instances=cluster.instances,
            usd_per_hour=cost["usd_per_hour"],
            fits=report["memory"]["fits"],
        )
    return found
