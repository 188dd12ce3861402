"""The fitted constants of the machine model, from `calibration.toml`, the one file that holds any.

Each entry names its mechanism, the rows it was fitted on, how, and the band between the
conservative and the peak profile. Everything that is not fitted is in the data files of the target.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("calibration.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One fitted constant. `band` holds its value in the conservative and in the peak profile."""

    name: str
    value: float
    unit: str
    band: tuple[float, float]
    mechanism: str
    method: str
    fitted_on: str

    def under(self, profile: str) -> float:
        """The value a profile uses."""
        low, high = self.band
        return {"conservative": low, "nominal": self.value, "peak": high}[profile]


@cache
def constants() -> dict[str, Fitted]:
    """All fitted constants by name."""
    data = tomllib.loads(FILE.read_text())
    return {
        name: Fitted(name=name, **(entry | {"band": tuple(entry["band"])}))
        for name, entry in data.items()
    }
