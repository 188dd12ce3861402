"""Import rules, one file per file of `compiler/ir/ops`; importing this package fills the table."""

from __future__ import annotations

from compiler.frontend.rules import bits, control, dot, elementwise, gather, reduce, shape
from compiler.frontend.rules.registry import RULES, RefusedError, Rule, imports, refuse

__all__ = [
    "RULES",
    "RefusedError",
    "Rule",
    "bits",
    "control",
    "dot",
    "elementwise",
    "gather",
    "imports",
    "reduce",
    "refuse",
    "shape",
]
