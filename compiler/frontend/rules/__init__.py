"""Import rules, one file per file of `compiler/ir/ops`; importing this package fills the table."""

from __future__ import annotations

from shardwright.compiler.frontend.rules import (
    batch_norm,
    bits,
    collective,
    control,
    convolution,
    custom_call,
    dot,
    elementwise,
    gather,
    random,
    reduce,
    shape,
    sort,
    window,
)
from shardwright.compiler.frontend.rules.registry import RULES, RefusedError, Rule, imports, refuse

__all__ = [
    "RULES",
    "RefusedError",
    "Rule",
    "batch_norm",
    "bits",
    "collective",
    "control",
    "convolution",
    "custom_call",
    "dot",
    "elementwise",
    "gather",
    "imports",
    "random",
    "reduce",
    "refuse",
    "shape",
    "sort",
    "window",
]
