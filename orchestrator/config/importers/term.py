"""A term of another framework beside what it is here: a row of what was said and what is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


_ANSWERS = {"strategy.tensor_plan": "SW_TENSOR_PLAN"}
"""Keys -> the code of findings that say what became of them."""


def answered(terms: Sequence[Term], findings: Iterable[Mapping[str, Any]]) -> tuple[Term, ...]:
    """Rows with what the answer found about their keys: notes are done, warnings differ."""
    told = [(found["code"], found["severity"], found["message"]) for found in findings]

    def of(one: Term) -> Term:
        codes = {_ANSWERS[key] for key in one.keys if key in _ANSWERS}
        own = [(severity, text) for code, severity, text in told if code in codes]
        if not own:
            return one
        does = "; ".join(text for severity, text in own if severity == "note")
        whys = [one.why, *(text for severity, text in own if severity != "note")]
        why = "; ".join(filter(None, whys))
        return replace(one, does=does or one.does, why=why)

    return tuple(map(of, terms))
