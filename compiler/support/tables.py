"""Tables of rules by op name, filled by decorators where the rules are written.

A table is complete once the package of its rules has been imported; whoever looks up decides what a
missing entry means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Rule = TypeVar("Rule")


class Entering(Protocol[Rule]):
    """`@rule(*names)`: enters the decorated rule under every name."""

    def __call__(self, *names: str) -> Callable[[Rule], Rule]:
        """The decorator."""


def entering(table: dict[str, Rule], what: str) -> Entering[Rule]:
    """The decorator that fills `table`; it raises ValueError on a second `what` for a name."""

    def of(*names: str) -> Callable[[Rule], Rule]:
        def enter(rule: Rule) -> Rule:
            for name in names:
                if name in table:
                    raise ValueError(f"{name} has two {what}s")
                table[name] = rule
            return rule

        return enter

    return of
