"""A step whose indices are padded to sizes that divide: a vocabulary, heads, columns.

Every value that walks along a padded index grows; what is in the padding never reaches a value of
the step, because a sum, a maximum or a product over the index masks it first. An op that cannot
take a padded dim reads and gives the original size, so that padding changes no result, only cost.
State and results are stored padded: `Slot.shape` keeps the user's shape, what is read is cropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import combination, counted_dim, lookup, pairing, resized, splat
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import BroadcastInDimAttrs
from shardwright.compiler.ir.ops.gather import last_starts
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import CONTRACTIONS, of
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.sharding.indices.dims import Dim, factors
from shardwright.sharding.indices.indices import Class, IndexClasses
from shardwright.sharding.indices.tensor_parallel import contracted

Shape = tuple[int, ...]
WHOLE = of(Kind.WINDOW, Kind.SORT)
"""Ops that read and give original sizes."""


def padded_shapes(
    indices: IndexClasses, sizes: Mapping[Class, Fraction], values: Sequence[Value]
) -> dict[Value, Shape]:
    """The shapes of values whose dims are of padded families; `sizes` says by how much."""
    found = {}
    for value in values:
        grown = list(value.type.shape)
        for dim, family in indices.families(value):
            grown[dim] = _grown(grown[dim], sizes.get(family, Fraction(1)))
        found[value] = tuple(grown)
    return found


def _grown(size: int, by: Fraction) -> int:
    """A size that grows by a factor; one that is no multiple of the index stays."""
    new = size * by
    return int(new) if new.denominator == 1 and size > 1 else size


def pad_indices(
    graph: Graph, sizes: Mapping[Class, Fraction], indices: IndexClasses, same: Mapping[int, int]
) -> Graph:
    """`graph` with the families of `sizes` padded.

    `same` maps outputs to the inputs whose place they take. Others stay as padded as they come: one
    that was cut here would end its index, which could then not be split.
    """
    return _Level(indices, sizes).region(graph, same)


class _Level(Builder):
    """One level being rebuilt: `env` maps its values to new ones."""

    def __init__(self, indices: IndexClasses, sizes: Mapping[Class, Fraction]) -> None:
        super().__init__()
        self.indices = indices
        self.sizes = sizes
        self.env: dict[Value, Value] = {}
        self.made: dict[Value, Op] = {}
        self._fitted: dict[tuple[Value, Shape], Value] = {}
        self._masked: dict[tuple[Value, int, str], Value] = {}

    def region(self, graph: Graph, same: Mapping[int, int]) -> Graph:
        """`graph` with padded inputs; output j is shaped like input `same[j]`, or as it became."""
        shapes = padded_shapes(self.indices, self.sizes, graph.inputs)
        inputs = tuple(Value(tensor_type(shapes[v], v.type.dtype)) for v in graph.inputs)
        self.env.update(zip(graph.inputs, inputs, strict=True))
        for op in graph.ops:
            self._pad(op)
        outputs = tuple(
            self.fitted(v, shapes[graph.inputs[same[j]]]) if j in same else self.env[v]
            for j, v in enumerate(graph.outputs)
        )
        return with_ops(graph, self.ops, outputs, inputs)

    def append(self, op: Op) -> tuple[Value, ...]:
        """Add an op made elsewhere."""
        self.made.update(dict.fromkeys(op.results, op))
        return super().append(op)

    def _pad(self, op: Op) -> None:
        """`op` on padded operands."""
        if op.regions:
            self._loop(op)
            return
        if all(self.env[v].type == v.type for v in op.operands):
            self._emit(op, tuple(self.env[v] for v in op.operands), op.attrs)
            return
        factor = _factors_of_growth(op, self.env)
        operands = tuple(self.fitted(v, _shape(v, factor)) for v in op.operands)
        results = tuple(_shape(v, factor) for v in op.results)
        attrs = resized(op, results[0]) if len(results) == 1 else op.attrs
        if self._pads_rows(op):  # what is in the padding is no row
            attrs = replace(attrs, last_starts=last_starts(op))
        if _has_form(op, operands, attrs, results):
            self._emit(op, self._masked_operands(op, operands), attrs)
        else:
            self._emit(op, tuple(self.fitted(v, v.type.shape) for v in op.operands), op.attrs)

    def _pads_rows(self, op: Op) -> bool:
        """Whether a lookup has padding where its indices point."""
        windows = lookup(op)
        if windows is None:
            return False
        table, grown = op.operands[0].type.shape, self.env[op.operands[0]].type.shape
        return any(table[d] != grown[d] for d in windows.index_map)

    def _emit(
        self, op: Op, operands: tuple[Value, ...], attrs: Any, regions: Sequence[Graph] = ()
    ) -> None:
        """Append `op` with other operands and new results."""
        results = self.append(make_op(op.name, operands, attrs, regions, op.loc))
        self.env.update(zip(op.results, results, strict=True))

    def _loop(self, op: Op) -> None:
        """Carries are padded by their families, at all four places."""
        (body,) = op.regions
        region = _Level(self.indices, self.sizes).region(
            body, {i: i for i in range(len(op.results))}
        )
        pairs = zip(op.operands, region.inputs, strict=True)
        self._emit(op, tuple(self.fitted(v, w.type.shape) for v, w in pairs), op.attrs, (region,))

    def fitted(self, value: Value, shape: Shape) -> Value:
        """The new form of `value` in `shape`: dims cut, then padded."""
        new = self.env[value]
        if new.type.shape == shape:
            return new
        key = (new, shape)
        if key not in self._fitted:
            self._fitted[key] = self._again(new, shape) or self._cut_and_padded(new, shape)
        return self._fitted[key]

    def _again(self, new: Value, shape: Shape) -> Value | None:
        """What only repeats or counts is made again in another size."""
        op = self.made.get(new)
        if op is None:
            return None
        if isinstance(op.attrs, BroadcastInDimAttrs):
            given = op.operands[0].type.shape
            if any(n != 1 and shape[d] != n for n, d in zip(given, op.attrs.dims, strict=True)):
                return None
        elif splat(op) is None and counted_dim(op) is None:
            return None
        return self.append(make_op(op.name, op.operands, resized(op, shape), loc=op.loc))[0]

    def _cut_and_padded(self, new: Value, shape: Shape) -> Value:
        given = new.type.shape
        cut = tuple(min(a, b) for a, b in zip(given, shape, strict=True))
        build = Builder(loc=self.made[new].loc if new in self.made else UNKNOWN_LOC)
        none = (0,) * len(cut)
        if cut != given:
            new = build.slice(new, none, cut)
        if cut != shape:
            high = tuple(b - a for a, b in zip(cut, shape, strict=True))
            new = build.pad(new, build.full((), 0, new.type.dtype), none, high)
        for op in build.ops:
            self.append(op)
        return new

    def _masked_operands(self, op: Op, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        """Operands without their padding along the dims that `op` sums over."""
        summed = [] if OPS[op.name].kind is Kind.INDEXED else list(dict.fromkeys(contracted(op)))
        kind = combination(op)
        found = []
        for value, new in zip(op.operands, operands, strict=True):
            for dim in (d for v, d in summed if v is value):
                if new.type.shape[dim] != value.type.shape[dim]:
                    new = self._mask(new, dim, value.type.shape[dim], kind)
            found.append(new)
        return tuple(found)

    def _mask(self, value: Value, dim: int, size: int, kind: str) -> Value:
        """`value` with what a fold of `kind` ignores behind the first `size` elements of `dim`."""
        key = (value, dim, kind)
        if key not in self._masked:
            shape, dtype = value.type.shape, value.type.dtype
            limit = self.full(shape, size, DType.I32)
            inside = self.compare(self.iota(shape, dim), limit, "LT")
            rest = self.full(shape, identity(kind, dtype).item(), dtype)
            self._masked[key] = self.op("select", inside, value, rest)
        return self._masked[key]


def _has_form(op: Op, operands: Sequence[Value], attrs: Any, results: Sequence[Shape]) -> bool:
    """True when `op` gives `results` in padded shapes; where windows move or rows are sorted, what
    is in the padding would count.
    """
    if op.name in WHOLE or (op.name in CONTRACTIONS and pairing(op) is None):
        return False
    try:
        made = make_op(op.name, operands, attrs)
    except ValueError:
        return False
    return [v.type.shape for v in made.results] == list(results)


def _shape(value: Value, growth: Mapping[Dim, Fraction]) -> Shape:
    """The shape of a value whose dims grow."""
    dims = enumerate(value.type.shape)
    return tuple(_grown(size, growth.get((value, d), Fraction(1))) for d, size in dims)


def _factors_of_growth(op: Op, env: Mapping[Value, Value]) -> dict[Dim, Fraction]:
    """By how much each dim of `op` grows: as its operands did, along dims that walk together."""
    own = {
        (v, d): Fraction(env[v].type.shape[d], size)
        for v in op.operands
        for d, size in enumerate(v.type.shape)
        if size
    }
    found: dict[Dim, Fraction] = {}
    for group in factors(op):
        most = max((own.get(dim, Fraction(1)) for dim in group), default=Fraction(1))
        if most > 1:
            found.update(dict.fromkeys(group, most))
    for dim in contracted(op):
        if own.get(dim, Fraction(1)) > 1 and (OPS[op.name].kind in (Kind.REDUCTION, Kind.INDEXED)):
            found[dim] = own[dim]
    return found
