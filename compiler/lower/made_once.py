"""Quadratic values made once for all readers of a function: another form of it.

The passes over the step give far readers copies of their own (`passes/remat`), so that rows of
scores can stay on chip wherever they are read. Where the readers are in one function and rows are
short, storing a value may cost less than rematerialising it; `function.py` compares both forms.
What a checkpoint computes again besides is left alone.
"""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.compiler.ir.rewrite import Level
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.passes.cse import key_of
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.remat.recipes import Recipes


def made_once(graph: Graph, most_bytes: int) -> Graph | None:
    """`graph` (loop-free, without barriers) in which equal quadratic values of at most `most_bytes`
    are one, and what follows equally from those; None when no two are equal.
    """
    recipes, level = Recipes(graph), Level()
    seen: dict[Hashable, tuple[Value, ...]] = {}
    shared: set[Value] = set()
    for op in graph.ops:
        op = level.update(op)
        key = key_of(op)
        first = seen.setdefault(key, op.results) if key is not None else op.results
        small = all(v.type.num_bytes <= most_bytes for v in op.results)
        wanted = any(map(recipes.may_pay, op.results)) or not shared.isdisjoint(op.operands)
        if first is op.results or not (small and wanted):
            level.ops.append(op)
            continue
        level.replace(op.results, first)
        shared.update(first)
    return dce(level.finish(graph)) if shared else None
