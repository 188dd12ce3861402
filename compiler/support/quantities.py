"""Amounts as people write them: a number and its unit, `1T` tokens, `30d`, `2M` dollars.

A kind of amount is a table of units; what a job file or a flag says is read once, here, into
tokens, seconds or dollars.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

_WRITTEN = re.compile(r"\$?(?P<number>\d[\d_]*(?:\.\d+)?(?:e\+?\d{1,3})?) *(?P<unit>[a-z]*)", re.I)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A kind of amount: what one of each unit is worth, "" for a number without one, and how it is
    written, for errors."""

    units: Mapping[str, int]
    form: str
    whole: bool = False

    def read(self, value: Any) -> int | float | None:
        """The amount that `value` means, text or a number of TOML; None for anything else. Nothing,
        0, needs no unit."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        match = _WRITTEN.fullmatch(str(value).strip())
        if match is None:
            return None
        number = Decimal(match["number"].replace("_", ""))
        unit = self.units.get(match["unit"].lower(), None if number else 1)
        amount = None if unit is None else number * unit
        if amount is None or (self.whole and amount != amount.to_integral_value()):
            return None
        return int(amount) if self.whole else float(amount)


_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
TOKENS = Quantity(
    {**_THOUSANDS, "ki": 2**10, "mi": 2**20, "gi": 2**30},
    "a whole number of tokens, as in 1T, 300B, 4M or 4Mi (2^20 each)",
    whole=True,
)
DURATION = Quantity(
    {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800},
    "a duration with its unit, as in 30d, 6w, 36h, 90min or 600s",
)
MONEY = Quantity(_THOUSANDS, "dollars, as in 2M, 750K or 1999.50")


def amount(kind: Quantity, most: float) -> Any:
    """A field of a configuration that is an amount, from 0, which is none, to `most`."""
    metadata = {"read": kind.read, "form": kind.form, "range": (0, most)}
    return field(default=0 if kind.whole else 0.0, metadata=metadata)
