"""The table of import rules: which function turns which StableHLO op into ops of our IR.

A rule gets a `Site` (the MLIR op with its operands already converted), emits ops through it and
returns one value per result. Rules live in the files of this folder, named like those of
`compiler/ir/ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.support.tables import entering

if TYPE_CHECKING:
    from shardwright.compiler.frontend.rules.site import Site, Values

Rule = Callable[["Site"], "Values"]
Check = Callable[["Site"], None]
"""Looks at an op before its rule does: refuses it, or changes the operands of the site."""

RULES: dict[str, Rule] = {}
imports = entering(RULES, "import rule")
REFUSALS: set[str] = set()
"""Names whose rule always refuses: it is there to say more than "not supported"."""


class RefusedError(Exception):
    """An op that cannot be imported; the importer adds its location."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint

    def at(self, loc: Loc | None, before: str = "") -> ImportRuleError:
        """The error to raise for the op at `loc`; `before` stands in front of the message."""
        return ImportRuleError(self.code, f"{before}{self}", loc, self.hint)


def refuse(code: str, message: str, hint: str = "") -> NoReturn:
    """Refuse the op being imported."""
    raise RefusedError(code, message, hint)


def refuses(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule that always refuses. Raises ValueError, as `imports`."""
    REFUSALS.update(names)
    return imports(*names)
