"""Rewrites of single ops: a rule per op builds what stands for it, one driver runs the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder, Dims
from shardwright.compiler.ir.ops import BitcastConvertAttrs, CompareAttrs
from shardwright.compiler.ir.rewrite import Level
from shardwright.compiler.ir.types import Graph, Op, Value


class IndexedLevel(Level):
    """A level whose rules look around: `made` are the producers, `users` the readers of each value
    of the old graph.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.made = graph.producers()
        self.users = graph.uses()
        self.outputs = frozenset(graph.outputs)


class Site(Builder):
    """Where one op is rewritten: new ops take its location. A number among operands becomes a splat
    like the last operand that is a value.
    """

    def __init__(self, level: IndexedLevel, op: Op) -> None:
        super().__init__(loc=op.loc)
        self.level = level

    def op(self, name: str, *operands: Value | float, attrs: Any = None) -> Value:
        """Add an op with one result."""
        given = [v for v in operands if isinstance(v, Value)]
        values = [v if isinstance(v, Value) else self.splat(v, given[-1]) for v in operands]
        return super().op(name, *values, attrs=attrs)

    def splat(self, number: float, like: Value) -> Value:
        """`number` in the type of `like`."""
        return self.full(like.type.shape, number, like.type.dtype)

    def compare(self, a: Value, b: Value | float, direction: str) -> Value:
        """a < b and the like."""
        return self.op("compare", a, b, attrs=CompareAttrs(direction))

    def as_type(self, a: Value, dtype: DType) -> Value:
        """`a`, converted unless it is of `dtype`."""
        return a if a.type.dtype is dtype else self.convert(a, dtype)

    def bits(self, a: Value, dtype: DType = DType.I32) -> Value:
        """The bits of a 32-bit value as another type."""
        return self.op("bitcast_convert", a, attrs=BitcastConvertAttrs(dtype))

    def padded(self, a: Value, fill: float | np.ndarray, low: Dims, high: Dims) -> Value:
        """`a` with `fill` around it, itself where nothing is; a negative padding is a slice."""
        start = [max(0, -n) for n in low]
        limit = [n - max(0, -h) for n, h in zip(a.type.shape, high, strict=True)]
        if any(start) or tuple(limit) != a.type.shape:
            a = self.slice(a, start, limit)
        before, after = ([max(0, n) for n in side] for side in (low, high))
        if not any((*before, *after)):
            return a
        return self.pad(a, self.constant(fill, a.type.dtype), before, after)


Rule = Callable[[Site, Op], Sequence[Value] | Value | None]
"""What stands for the results of an op; None where the op may stay."""


def rewritten(graph: Graph, rule_of: Callable[[Op], Rule | None]) -> Graph:
    """`graph` (loop-free) with every op replaced by what its rule makes of it."""
    if not any(map(rule_of, graph.ops)):
        return graph
    level = IndexedLevel(graph)
    for op in map(level.update, graph.ops):
        if all(v in level.replaced for v in op.results):
            continue  # a rule took it together with an earlier op
        rule, site = rule_of(op), Site(level, op)
        made = rule(site, op) if rule else None
        if made is None:
            level.ops.append(op)
        else:
            level.ops += site.ops
            level.replace(op.results, (made,) if isinstance(made, Value) else made)
    return level.finish(graph)
