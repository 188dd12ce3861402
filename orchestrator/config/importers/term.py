"""A term of another framework beside what it is here: a row of what was said and what is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc

DIFFERS = "SW_TORCH_TERM"
"""The code of a row where what is done is not what was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A row: what was said (and where), the keys of a job that it gives or what is done in words,
    and why that is not the same, where it is not."""

    term: str
    said: str
    loc: Loc = UNKNOWN_LOC
    keys: Mapping[str, Any] = field(default_factory=dict)
    does: str = ""
    why: str = ""

    @property
    def done(self) -> str:
        """What is done, in a user's words."""
        told = [f"{key} = {shown(value)}" for key, value in self.keys.items()]
        return "; ".join([*told, *([self.does] if self.does else [])]) or "nothing"

    def as_dict(self) -> dict[str, Any]:
        """The row of the report."""
        return {
            "term": self.term,
            "said": self.said,
            "file": self.loc.file,
            "line": self.loc.line,
            "done": self.done,
            "keys": dict(self.keys),
            "code": DIFFERS if self.why else "",
            "why": self.why,
        }


def shown(value: Any) -> str:
    """A value as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
