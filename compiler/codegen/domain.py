"""A kernel's iteration domain: values at its points, and how addresses move over it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.attributes import NodeKind, nodes_of
from shardwright.compiler.isa.kernel import STORES, Affine, Node, Tensor

Tensors = Sequence[Tensor]
IterDims = tuple[int, ...]
Numbers = tuple[int, ...]
"""Of values of a domain."""
PerDim = Mapping[int, int]
"""Strides, extents or sizes by iter dim."""
ACTIVATIONS = nodes_of(NodeKind.CURVED)
UNARY = nodes_of(NodeKind.UNARY)
BINARY = nodes_of(NodeKind.BINARY)
MASK = "mask"  # a predicate over positions (`positions.py`)
SPLATS = ("constant", "register")
CODELESS = (*SPLATS, MASK)  # made where they are read
PARTS = ("part", "join")  # of coalesced views (`coalesce.py`): values without code
SCALED = "scaled"
"""A node of code generation's own: func(x * scale + bias), as `fusion.py` makes it."""
FROM_PSUM = nodes_of(NodeKind.CURVED, NodeKind.UNARY, NodeKind.BINARY) | {SCALED}
"""Elementwise nodes whose code reads PSUM; Vector and Scalar reach it, GpSimd and DMA do not."""


@dataclass(frozen=True, slots=True)
class CoordBound:
    """A bounded coordinate of an access (`isa.kernel.Bound`): start, size, unit, steps by dim."""

    start: int
    size: int
    unit: int
    strides: PerDim


@dataclass(frozen=True, slots=True)
class AccessMap:
    """How an address (or an iota value) moves: start, and a step per iter dim that moves it."""

    offset: Affine
    strides: PerDim
    tensor: int = -1
    bounds: tuple[CoordBound, ...] = ()

    def stride(self, iter_dim: int | None) -> int:
        """Step along `iter_dim`, 0 when it does not move."""
        return self.strides.get(iter_dim, 0) if iter_dim is not None else 0


@dataclass(frozen=True, slots=True)
class Count:
    """An integer: start + a step per iter dim + a factor per loaded number (by value)."""

    start: Affine = field(default_factory=Affine)
    steps: PerDim = field(default_factory=dict)
    loaded: Mapping[int, int] = field(default_factory=dict)

    @property
    def number(self) -> int | None:
        """The constant this is; None for others."""
        return None if self.steps or self.loaded or self.start.terms else self.start.const

    def plus(self, other: Count) -> Count:
        """The sum."""
        steps, loaded = _added(self.steps, other.steps), _added(self.loaded, other.loaded)
        return Count(self.start + other.start, steps, loaded)

    def times(self, factor: int) -> Count:
        """The multiple."""
        steps = {a: step * factor for a, step in self.steps.items() if factor}
        loaded = {n: step * factor for n, step in self.loaded.items() if factor}
        return Count(self.start * factor, steps, loaded)

    def product(self, other: Count) -> Count | None:
        """The product, where one of both is a constant."""
        if self.number is not None:
            return other.times(self.number)
        return None if other.number is None else self.times(other.number)


def _added(a: PerDim, b: PerDim) -> dict[int, int]:
    total = {key: a.get(key, 0) + b.get(key, 0) for key in sorted({*a, *b})}
    return {key: value for key, value in total.items() if value}


@dataclass(frozen=True, slots=True)
class Value:
    """A node of a domain; `map`: what loads, stores, iotas and masks walk; `over` is summed."""

    op: str
    inputs: Numbers
    iter_dims: frozenset[int]
    dtype: DType
    map: AccessMap | None = None
    over: frozenset[int] = frozenset()
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def access(self) -> AccessMap:
        """The access map of what has one: loads, stores, iotas and masks."""
        assert self.map is not None, self
        return self.map

    def reading(self, inputs: Numbers) -> Value:
        """The same of other inputs."""
        return Value(self.op, inputs, self.iter_dims, self.dtype, self.map, self.over, self.attrs)


@dataclass(frozen=True, slots=True)
class Split:
    """Iter dim `major` counts whole runs of `minor`; a last run of `tail` follows, if any."""

    major: int
    minor: int
    tail: int


@dataclass(slots=True)
class Domain:
    """An iteration domain: iter dims (size per number), values in topological order, splits.

    The size of a split's major iter dim counts whole runs only.
    """

    name: str
    sizes: dict[int, int]
    values: list[Value]
    splits: dict[int, Split] = field(default_factory=dict)  # by major iter dim
    coalesced: frozenset[int] = frozenset()  # iter dims that count views: always whole in a tile

    def __getitem__(self, number: int) -> Value:
        """Value `number`."""
        return self.values[number]

    @property
    def roots(self) -> list[int]:
        """Numbers of the stores."""
        return [n for n, v in enumerate(self.values) if v.op in STORES]

    def slice(self, roots: Iterable[int], given: Collection[int] = ()) -> list[int]:
        """`roots` and everything they need, in order; values that are `given` need nothing."""
        return needed(self.values, roots, given)

    def users(self, among: Iterable[int] | None = None) -> dict[int, list[int]]:
        """Readers of each value, looking at the values `among` only if given."""
        found: dict[int, list[int]] = {}
        for n in range(len(self.values)) if among is None else among:
            for i in self.values[n].inputs:
                found.setdefault(i, []).append(n)
        return found

    def homes(self, among: Iterable[int]) -> dict[int, int]:
        """For values in the tile of another (see `coalesce.py`): the value that owns it."""
        found: dict[int, int] = {}
        for n in among:
            value = self.values[n]
            if value.op == "part":
                found[n] = value.inputs[0]
            elif value.op == "join":
                found.update(dict.fromkeys(value.inputs, n))
        return found

    def size(self, iter_dim: int | None) -> int:
        """Size of an iter dim, 1 for none."""
        return 1 if iter_dim is None else self.sizes[iter_dim]

    def points(self, iter_dims: Iterable[int]) -> int:
        """Points of some iter dims (tails not counted)."""
        return math.prod(self.sizes[a] for a in iter_dims)

    def elements(self, value: Value) -> int:
        """Number of elements of a value (tails not counted)."""
        return self.points(value.iter_dims)


OfRoots = tuple[Domain, Numbers]
"""A domain made for some values, mostly roots, and their numbers in it."""


def needed(
    nodes: Sequence[Node] | Sequence[Value], roots: Iterable[int], given: Collection[int] = ()
) -> list[int]:
    """`roots` and everything they need, in order; nodes that are `given` need nothing."""
    wanted = set(roots)
    for n in range(len(nodes) - 1, -1, -1):
        if n in wanted and n not in given:
            wanted.update(nodes[n].inputs)
    return sorted(wanted)


class Rewriting:
    """A domain made anew, value by value; `number` says what old values have become so far."""

    def __init__(self, domain: Domain) -> None:
        self.old = domain
        self.values: list[Value] = []
        self.number: dict[int, int] = {}

    def run(self) -> Domain:
        """The new domain."""
        for n, value in enumerate(self.old.values):
            inputs = tuple(self.read(n, i) for i in value.inputs)
            self.number[n] = self.made(
                n, value if inputs == value.inputs else value.reading(inputs)
            )
        return replace(self.old, values=self.values)

    def read(self, n: int, i: int) -> int:
        """What value `n` reads for old value `i`."""
        return self.number[i]

    def made(self, n: int, value: Value) -> int:
        """Append what becomes of old value `n`, its inputs new ones; returns its new number."""
        return self.add(value)

    def add(self, value: Value) -> int:
        """Append a value; returns its number."""
        self.values.append(value)
        return len(self.values) - 1
