"""A graph under reconstruction: what the rewrites in front of lowering build with.

Rules append ops and say which value of the old graph stands for which new one; ops that no rule
takes are copied with their operands replaced (`canonical.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compiler.dtypes import DType
from compiler.ir.opdef import make_op
from compiler.ir.ops import ConstantAttrs
from compiler.ir.types import Graph, Op, Value, tensor_type


class Level:
    """One level of ops; `users` are the readers of each value of the old graph."""

    def __init__(self, graph: Graph) -> None:
        self.made = graph.producers()
        self.users = graph.uses()
        self.outputs = frozenset(graph.outputs)
        self.ops: list[Op] = []
        self.replaced: dict[Value, Value] = {}

    def add(self, name: str, *operands: Value, attrs: Any = None, like: Op | None = None) -> Value:
        """Append an op; `like` lends its location."""
        given = tuple(self.replaced.get(v, v) for v in operands)
        op = make_op(name, given, attrs, loc=like.loc) if like else make_op(name, given, attrs)
        self.ops.append(op)
        self.made[op.result] = op
        return op.result

    def full(self, shape: Sequence[int], value: float, dtype: DType, like: Op) -> Value:
        """A splat."""
        data = np.asarray(value).astype(dtype.numpy).tobytes()
        return self.add(
            "constant", attrs=ConstantAttrs(data, tensor_type(tuple(shape), dtype)), like=like
        )
