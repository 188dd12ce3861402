"""The tables `[goal]` and `[price]`: what a training is for, and what an instance costs.

Neither is in the key of a plan, so that a stored one answers any goal at any price.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.machine.target import PRICE_KINDS, machine_name
from shardwright.compiler.options import choice
from shardwright.compiler.support.quantities import DURATION, MONEY, TOKENS, amount


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalConfig:
    """What the training is for; it changes no plan, a stored one answers any goal."""

    tokens: int = amount(TOKENS, 1e18)
    """Tokens to train on (samples, where those are not made of tokens): `1T`; 0: no goal."""

    deadline: float = amount(DURATION, 1e10)
    """The time there is, failures and checkpoints included: `30d`; in seconds, 0: any."""

    budget: float = amount(MONEY, 1e15)
    """The dollars there are, for instances alone: `2M`; 0: any."""


Prices = tuple[tuple[str, float], ...]
"""Machines, and dollars per hour of an instance of each."""


def _read_prices(value: Any) -> Prices | None:
    """A number, for the job's own machine; `MACHINE=NUMBER, ...`; or a table of TOML."""
    if isinstance(value, str) and "=" in value:
        pairs = [part.rpartition("=") for part in value.split(",")]
        given = [(machine.strip(), text) for machine, _, text in pairs]
    elif isinstance(value, dict):
        given = list(value.items())
    else:
        only = MONEY.read(value)
        return () if value == "" else None if only is None else (("", only),)
    found = {machine_name(machine): MONEY.read(usd) for machine, usd in given if machine}
    prices = tuple((machine, usd) for machine, usd in found.items() if usd is not None)
    return prices if len(prices) == len(given) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceConfig:
    """What an instance costs; it changes dollars, no plan. One kind of price for a whole
    comparison: a machine that has none of it has no dollars."""

    kind: str = choice("auto", "auto", *PRICE_KINDS)
    """Which published price counts. auto: that on demand. With prices of your own: what they
    are."""

    usd_per_hour: Prices = field(
        default=(),
        metadata={
            "read": _read_prices,
            "form": "dollars per hour of an instance, 21.5 for the job's machine, or"
            " trn1.32xlarge=9.5,trn2.48xlarge=36",
        },
    )
    """Prices of your own, per hour of an instance; with one, no published price counts."""


NO_GOAL, LISTED = GoalConfig(), PriceConfig()
