"""The error catalogue: what every code means and what to do about it.

The rows are `error_catalogue.toml`, grouped by the stage that raises them; every code in the source
is there, which a test enforces. Meanings of NCC_ codes follow the published error pages.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwright.compiler.diagnostics import UsageError, did_you_mean

_FILE = Path(__file__).with_suffix(".toml")

WHO = {
    "R": "a code of neuronx-cc, raised on its real trigger",
    "P": "a code of neuronx-cc, of a feature that is not offered yet",
    "N": "a code of neuronx-cc that this compiler cannot meet",
    "O": "a code of Shardwright",
}
"""Who raises a code, by the letter of its row."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One code."""

    code: str
    stage: str
    who: str
    meaning: str
    advice: str


@cache
def catalogue() -> dict[str, Entry]:
    """Code -> entry, in the order of the stages."""
    stages = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {
        code: Entry(code, stage, *row)
        for stage, rows in stages.items()
        for code, row in rows.items()
    }


def find(text: str) -> Entry:
    """The entry of a code as a user types it: any case, with or without its prefix.

    Raises: UsageError (SW_USAGE) with the nearest codes.
    """
    entries = catalogue()
    word = text.strip().strip("[]").upper()
    for code in (word, f"NCC_{word}", f"SW_{word}"):
        if code in entries:
            return entries[code]
    hint = did_you_mean(word, entries, "`shardwright errors` lists all codes")
    raise UsageError("SW_USAGE", f"no error has the code {text!r}", hint=hint)
