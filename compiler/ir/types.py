"""The graph IR: typed SSA values, slotted ops, regions.

One kind of node for the global graph, the partitioned graph (global types, a spec per value) and
the local graphs (per-core types). Passes build new graphs (`Graph -> Graph`); nothing is edited in
place once a graph is shared. What an op means is in `opdef.py` and `ops/`; this file only holds
structure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.dtypes import DType


@dataclass(frozen=True, slots=True)
class TensorType:
    """Static shape and element type. Build with `tensor_type`, which interns.

    `rank` is the number of dims, `num_elements` their product, `num_bytes` dense; all are computed
    once, since passes ask for them by the million.
    """

    shape: tuple[int, ...]
    dtype: DType
    rank: int = field(init=False, repr=False, compare=False)
    num_elements: int = field(init=False, repr=False, compare=False)
    num_bytes: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", len(self.shape))
        object.__setattr__(self, "num_elements", math.prod(self.shape))
        object.__setattr__(self, "num_bytes", self.num_elements * self.dtype.bytes)
        object.__setattr__(self, "_hash", hash((self.shape, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return tensor_type, (self.shape, self.dtype)  # element types hash otherwise elsewhere

    def resized(self, dim: int, size: int) -> TensorType:
        """The same with another size of one dim."""
        return tensor_type((*self.shape[:dim], size, *self.shape[dim + 1 :]), self.dtype)

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{d}x' for d in self.shape)}{self.dtype.value}>"


@cache
def tensor_type(shape: tuple[int, ...], dtype: DType) -> TensorType:
    """The one `TensorType` of this shape and element type."""
    return TensorType(shape, dtype)


class Value:
    """One SSA value. Identity is the object; equality is identity."""

    __slots__ = ("type",)

    def __init__(self, type: TensorType) -> None:
        self.type = type

    def __repr__(self) -> str:
        return f"<Value {self.type} at {id(self):x}>"


class Op:
    """One operation: a name registered in `ops/`, operands, results, attrs, regions, origin."""

    __slots__ = ("attrs", "loc", "name", "operands", "regions", "results")

    def __init__(
        self,
        name: str,
        operands: tuple[Value, ...],
        results: tuple[Value, ...],
        attrs: Any = None,
        regions: tuple[Graph, ...] = (),
        loc: Loc = UNKNOWN_LOC,
    ) -> None:
        self.name = name
        self.operands = operands
        self.results = results
        self.attrs = attrs
        self.regions = regions
        self.loc = loc

    @property
    def operand(self) -> Value:
        """The only operand."""
        (value,) = self.operands
        return value

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    def __repr__(self) -> str:
        return f"<Op {self.name} {[str(r.type) for r in self.results]}>"


class Graph:
    """Inputs, ops in program order, outputs.

    A region of an op is a Graph too; it may only use its own values.
    """

    __slots__ = ("inputs", "name", "ops", "outputs")

    def __init__(
        self,
        inputs: tuple[Value, ...],
        ops: tuple[Op, ...],
        outputs: tuple[Value, ...],
        name: str = "main",
    ) -> None:
        self.inputs = inputs
        self.ops = ops
        self.outputs = outputs
        self.name = name

    def walk(self) -> Iterator[Op]:
        """Every op, an op before the ops of its regions: the order of op ordinals."""
        for op in self.ops:
            yield op
            for region in op.regions:
                yield from region.walk()

    def uses(self) -> dict[Value, list[Op]]:
        """Users of each value at this level; graph outputs are not users."""
        users: dict[Value, list[Op]] = {}
        for op in self.ops:
            for operand in dict.fromkeys(op.operands):
                users.setdefault(operand, []).append(op)
        return users

    def producers(self) -> dict[Value, Op]:
        """The op that defines each value at this level; inputs are absent."""
        return {result: op for op in self.ops for result in op.results}
