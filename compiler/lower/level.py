"""A level under reconstruction whose rules look around: what the rewrites of sorts, gathers and
scatters build with.

Beside what every pass shares (`passes/rewrite.py`), it knows who makes each value, old or new, and
who reads each value of the old graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ConstantAttrs
from shardwright.compiler.ir.rewrite import Level
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type


class IndexedLevel(Level):
    """`made` are the producers of values, `users` the readers of each value of the old graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.made = graph.producers()
        self.users = graph.uses()
        self.outputs = frozenset(graph.outputs)

    def add(self, name: str, *operands: Value, like: Op, attrs: Any = None) -> Value:
        """Append an op that takes the location of `like`."""
        op = make_op(name, tuple(map(self.now, operands)), attrs, loc=like.loc)
        self.ops.append(op)
        self.made[op.result] = op
        return op.result

    def full(self, shape: Sequence[int], value: float, dtype: DType, like: Op) -> Value:
        """A splat."""
        attrs = ConstantAttrs.full(value, tensor_type(tuple(shape), dtype))
        return self.add("constant", attrs=attrs, like=like)
