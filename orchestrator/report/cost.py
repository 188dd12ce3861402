"""What an instance costs, and a step on all of them: the price that was asked for, and no other.

Prices are facts of the machine (`compiler/machine/targets`), or the user's own; they change dollars
and no plan, so they are put on a report when it is shown, also on a stored one.
"""

from __future__ import annotations

from shardwright.compiler.machine.target import PRICE_KINDS, Fact, Target
from shardwright.orchestrator.config.purchase import PriceConfig
from shardwright.orchestrator.report.text import Facts

ON_DEMAND, CAPACITY_BLOCK = PRICE_KINDS
OWN = "own"
_WORDS = {ON_DEMAND: "on demand", CAPACITY_BLOCK: "in a Capacity Block", OWN: "at your own price"}
_NAMES = {ON_DEMAND: "on-demand", CAPACITY_BLOCK: "Capacity Block", OWN: "own"}
USD_TOKENS = 1e6
S_PER_HOUR = 3600.0


def price_of(target: Target, name: str, asked: PriceConfig) -> Facts:
    """The price of an instance of a machine, which the job calls `name`, of the kind that is asked
    for: None where it has none of that kind, and which kinds are published for it. `date` and
    `region` are of the list it is taken from."""
    kind, given = asked.kind, bool(asked.usd_per_hour)
    if kind == "auto":
        kind = OWN if given else ON_DEMAND
    if given:
        usd = dict(asked.usd_per_hour).get(name)
        fact = Fact(usd, "given" if usd is not None else "", "")
    else:
        fact = target.prices.get(kind, Fact(None, "", ""))
    return {
        "machine": name,
        "kind": kind,
        "given": given,
        "usd_per_hour": fact.value,
        "date": fact.date,
        "region": fact.region,
        "status": fact.status,
        "source": fact.source,
        "published": list(target.prices),
    }


def cost_section(price: Facts, instances: int, step_s: float, tokens: int) -> Facts:
    """Dollars of a step of so many tokens on all instances; None without a price."""
    if price["usd_per_hour"] is None:
        return dict.fromkeys(("usd_per_hour", "usd_per_step", "usd_per_1e6_tokens"))
    usd_per_hour = price["usd_per_hour"] * instances
    usd_per_step = usd_per_hour * step_s / S_PER_HOUR
    return {
        "usd_per_hour": usd_per_hour,
        "usd_per_step": usd_per_step,
        "usd_per_1e6_tokens": usd_per_step / tokens * USD_TOKENS,
    }


def basis_text(price: Facts | None) -> str:
    """What kind of price dollars are of: `on demand`. None is that of a report from before prices
    had kinds."""
    if price is None:
        return "at a price whose kind the report does not say"
    kind: str = price["kind"]
    words = _WORDS.get(kind, kind)
    return f"{_WORDS[OWN]}, {words}" if price["given"] and kind != OWN else words


def list_text(price: Facts | None) -> str:
    """The same with the region and the day of the list; what a user gave is from none."""
    if price is None or price["status"] == "given":
        return basis_text(price)
    told = (basis_text(price), price["region"] or "region not stated", price["date"])
    return ", ".join(filter(None, told))


def missing_text(price: Facts | None) -> str:
    """That a machine has no price of the kind asked for, and what there is."""
    if price is None:
        return "no price is published for this machine"
    if price["given"]:
        return f"no price of your own is given for {price['machine']}"
    kind = price["kind"]
    text = f"no {_NAMES.get(kind, kind)} price is published for {price['machine']}"
    others = [f"its {_NAMES.get(k, k)} price is: --price-kind {k}" for k in price["published"]]
    return "; ".join((text, *(others or ("give your own with --price",))))
