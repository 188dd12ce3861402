"""What a point of a region's index space is made of: values, and how addresses move over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.attributes import NodeKind, nodes_of
from shardwright.compiler.isa.region import Affine

ACTIVATIONS = nodes_of(NodeKind.CURVED)
UNARY = nodes_of(NodeKind.UNARY)
BINARY = nodes_of(NodeKind.BINARY)
SCALED = "scaled"
"""A node of code generation's own: func(x * scale + bias), as `fusion.py` makes it."""
FROM_PSUM = nodes_of(NodeKind.CURVED, NodeKind.UNARY, NodeKind.BINARY) | {SCALED}
"""Elementwise nodes whose code reads PSUM; Vector and Scalar reach it, GpSimd and DMA do not."""


@dataclass(frozen=True, slots=True)
class Limited:
    """A bounded coordinate of a walk (`isa.region.Bound`): start, size, unit, step per atom."""

    start: int
    size: int
    unit: int
    strides: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Walk:
    """How an address (or an iota value) moves: start, and a step per atom that moves it."""

    offset: Affine
    strides: Mapping[int, int]
    tensor: int = -1
    bounds: tuple[Limited, ...] = ()

    def stride(self, atom: int | None) -> int:
        """Step along `atom`, 0 when it does not move."""
        return self.strides.get(atom, 0) if atom is not None else 0


@dataclass(frozen=True, slots=True)
class Value:
    """A node of a space. `walk` places loads, stores and iotas; `over` lists summed atoms of reduce
    and contract.
    """

    op: str
    inputs: tuple[int, ...]
    atoms: frozenset[int]
    dtype: DType
    walk: Walk | None = None
    over: frozenset[int] = frozenset()
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def access(self) -> Walk:
        """The walk of what has one: loads, stores, iotas and masks."""
        assert self.walk is not None, self
        return self.walk
