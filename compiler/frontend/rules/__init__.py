"""Import rules, one file per file of `compiler/ir/ops`; importing this package fills the table."""

from __future__ import annotations

from importlib import import_module

from shardwright.compiler.frontend.rules.registry import RULES, Rule, imports

__all__ = ["RULES", "Rule", "imports"]

for _ops in (
    *("batch_norm", "bits", "collective", "control", "convolution", "custom_call", "dot"),
    *("elementwise", "gather", "gspmd", "manual", "random", "reduce", "shape", "sharding"),
    *("sort", "window"),
):
    import_module(f"{__name__}.{_ops}")
