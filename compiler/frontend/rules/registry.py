"""The table of import rules: which function turns which StableHLO op into ops of our IR.

A rule gets a `Site` (the MLIR op with its operands already converted), emits ops through it and
returns one value per result. Rules live in the files of this folder, named like those of
`compiler/ir/ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from shardwright.compiler.support.tables import entering

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site
    from shardwright.compiler.ir.types import Value

Rule = Callable[["Site"], "Sequence[Value]"]

RULES: dict[str, Rule] = {}
imports = entering(RULES, "import rule")
REFUSALS: set[str] = set()
"""Names whose rule always refuses: it is there to say more than "not supported"."""


class RefusedError(Exception):
    """An op that cannot be imported; the importer adds its location (`ImportRuleError`)."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def refuse(code: str, message: str, hint: str = "") -> NoReturn:
    """Refuse the op being imported."""
    raise RefusedError(code, message, hint)


def refuses(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule that always refuses. Raises ValueError, as `imports`."""
    REFUSALS.update(names)
    return imports(*names)
